# SPDX-License-Identifier: Apache-2.0
"""Below vLLM's ``MultiConnector``: the first child that has tokens loads, all of them store.

The other child is LMCache's own connector on a server of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm_harness import probes
from vllm_harness.engine import CONNECTORS, TIMEOUTS, Engine, prompt
from vllm_harness.kv import LAYOUTS, Geometry

from lmcache_rbln.lmcache_compat.worker import WorkerClient

every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def transfer(*children: tuple[str, str]) -> dict[str, Any]:
    """``MultiConnector`` over (connector, server) pairs, in that order."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "connectors": [
                {
                    **CONNECTORS[name],
                    "kv_role": "kv_both",
                    "kv_load_failure_policy": "recompute",
                    "kv_connector_extra_config": {**TIMEOUTS, "lmcache.mp.server_urls": url},
                }
                for name, url in children
            ]
        },
    }


def held(url: str, model: Path, tokens: list[int]) -> int:
    """Tokens of a prompt that are on the server once all that is not locked is dropped."""
    with WorkerClient(url, model_name=str(model)) as client:
        client.clear()
        name = f"held-{time.monotonic_ns()}"
        found = client.lookup(tokens, request_id=name)
        if found:
            client.free_lookup(tokens, request_id=name, end=found)
        return found


@pytest.mark.parametrize("first", ["rbln", "stock"])
@every_layout
def test_the_first_child_wins(
    servers: Callable[..., str],
    engines: Callable[..., Engine],
    tmp_path: Path,
    layout: str,
    first: str,
) -> None:
    second = "stock" if first == "rbln" else "rbln"
    urls = {"rbln": servers(64), "stock": servers(64, "other")}
    order = [(first, urls[first]), (second, urls[second])]
    engine = engines("", Geometry(layout), transfer=transfer(*order))
    (worker,) = engine.workers
    worker.call("run", probes.note_retrieves)
    tokens = prompt(1, 200)
    engine.run_one(tokens)
    engine.forget_local_cache()
    assert engine.loaded[engine.run_one(tokens)] == 192
    assert worker.call("run", probes.retrieves) == [1, 0]
    engine.check_over()
    # The loser has given its locks back: everything goes when the server is cleared.
    for url in urls.values():
        assert held(url, tmp_path / "model", tokens) == 0


@every_layout
def test_the_winner_has_less(
    servers: Callable[..., str], engines: Callable[..., Engine], layout: str
) -> None:
    """The other child loads one chunk where this one has three: no block is stored uncomputed."""
    urls = {"rbln": servers(128), "stock": servers(128, "other")}
    geometry = Geometry(layout, block_size=128, num_blocks=16)
    order = [("stock", urls["stock"]), ("rbln", urls["rbln"])]
    tokens = prompt(2, 600)
    # Worker 1 is one engine after the other; worker 0 is the one with both children.
    engines(urls["rbln"], geometry, workers=(1,)).run_one(tokens[:390])
    engines(urls["stock"], geometry, connector="stock", workers=(1,)).run_one(tokens[:130])
    engine = engines("", geometry, transfer=transfer(*order), max_batched_tokens=64)
    assert engine.loaded[engine.run_one(tokens)] == 128
    engine.check_over()
    # What this child has stored of it is right.
    reader = engines(urls["rbln"], geometry, workers=(1,))
    assert reader.loaded[reader.run_one(tokens)] == 512
    reader.check_over()
