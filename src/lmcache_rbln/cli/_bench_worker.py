# SPDX-License-Identifier: Apache-2.0
"""The worker of the end-to-end benchmark: stores and retrieves through a real LMCache server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from lmcache_rbln.cli._bench_measure import Setup, seconds
from lmcache_rbln.cli._bench_models import Row
from lmcache_rbln.lmcache_compat import selected
from lmcache_rbln.lmcache_compat.worker import StoreMode, Transport, WorkerClient


def measure(request: dict[str, Any], said: Callable[[str], None]) -> dict[str, Any]:
    """Measure one server.

    Args:
        request: ``url``; ``row``; ``fresh``, ``warm``: stores of each kind; ``samples`` of the
            device operation alone.
        said: Told what comes next.

    Returns:
        ``nbytes`` of a transfer; ``transport``; fastest seconds of ``fresh_store``, ``warm_store``,
        ``retrieve``, and of the device operation alone, ``alone_store``, ``alone_retrieve``;
        ``prefault_s``, or None where nothing was faulted in.
    """
    row = Row(**request["row"])
    setup = Setup(row)
    said("device operation alone")
    alone = setup.ours()
    result: dict[str, Any] = {
        "nbytes": setup.nbytes,
        "alone_store": min(seconds(alone.store) for _ in range(request["samples"])),
        "alone_retrieve": min(seconds(alone.retrieve) for _ in range(request["samples"])),
    }
    layers = {f"layer.{index}": layer for index, layer in enumerate(setup.layers)}
    with WorkerClient(request["url"], model_name="bench") as client:
        # Synchronous stores: their time is the store's, not a queue's.
        transport = client.register(layers, block_size=row.block_size, store_mode=StoreMode.SYNC)
        result["transport"] = transport.value
        result["prefault_s"] = _prefaulted() if transport is Transport.SHARED_MEMORY else None
        texts = _texts(row)
        said("stores into fresh memory")
        result["fresh_store"] = min(
            _store(client, setup, next(texts)) for _ in range(request["fresh"])
        )
        said("stores into used memory, retrieves")
        stores, retrieves = [], []
        for _ in range(request["warm"]):
            client.clear()
            text = next(texts)
            stores.append(_store(client, setup, text))
            retrieves.append(_retrieve(client, setup, text))
        result["warm_store"], result["retrieve"] = min(stores), min(retrieves)
    return result


def _texts(row: Row) -> Iterator[list[int]]:
    """Token ids of one transfer each, all different."""
    count = row.chunks * row.blocks_per_chunk * row.block_size
    number = 0
    while True:
        number += 1
        yield [number * count + token for token in range(count)]


def _store(client: WorkerClient, setup: Setup, text: list[int]) -> float:
    start = time.perf_counter()
    stored = client.store(text, setup.block_ids, request_id=f"store-{text[0]}")
    took = time.perf_counter() - start
    if not stored:
        raise RuntimeError("the server did not take a store; its log says why")
    client.end_session(f"store-{text[0]}")
    return took


def _retrieve(client: WorkerClient, setup: Setup, text: list[int]) -> float:
    request_id = f"retrieve-{text[0]}"
    hit = client.lookup(text, request_id=request_id)
    if hit != len(text):
        raise RuntimeError(f"the server has {hit} of {len(text)} tokens that were stored")
    start = time.perf_counter()
    retrieved = client.retrieve(text, setup.block_ids, request_id=request_id)
    took = time.perf_counter() - start
    if not retrieved:
        raise RuntimeError("the server did not give back what was stored; its log says why")
    client.end_session(request_id)
    return took


def _prefaulted() -> float | None:
    """Seconds from here until the server's pool is faulted in; None if nobody does that."""
    start = time.monotonic()
    done = selected.pin_backend().wait(timeout=120)
    return time.monotonic() - start if done else None
