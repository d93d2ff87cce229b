# SPDX-License-Identifier: Apache-2.0
"""KV events and statistics are LMCache's: the same from both connectors."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
from vllm.distributed.kv_events import BlockStored
from vllm_harness.engine import CONNECTORS, prompt
from vllm_harness.kv import LAYOUTS, Geometry

from lmcache_rbln.integration.vllm.connector import RBLNLMCacheConnectorV1


def test_events(
    own_server: Callable[..., Any], engines: Callable[..., Any], tmp_path: Path
) -> None:
    """Workers report their own stores, where the server does not offer to.

    LMCache 0.5.6's server offers it by default, and then knows no tokens of engine-driven stores:
    nothing would be reported at all.
    """
    url = own_server(arguments=["--kv-event-log-size", "0"]).url
    tokens = prompt(1, 200)
    chunks = [tokens[start : start + 64] for start in (0, 64, 128)]
    hashes = []
    for layout, connector in itertools.product(LAYOUTS, CONNECTORS):
        engine = engines(
            url,
            Geometry(layout),
            connector=connector,
            kv_events=True,
            model=tmp_path / layout / connector / "model",
        )
        engine.run_one(tokens)
        deadline = time.monotonic() + 15
        while len(engine.events) < 3 and time.monotonic() < deadline:
            # Events are taken with the steps of an engine.
            engine.run_one(prompt(2, 20))
        assert all(isinstance(event, BlockStored) for event in engine.events)
        assert sorted(event.token_ids for event in engine.events) == sorted(chunks)
        assert {event.block_size for event in engine.events} == {64}
        assert {event.medium for event in engine.events} == {"CPU"}
        hashes.append(sorted(hash_ for event in engine.events for hash_ in event.block_hashes))
        engine.check_over()
    assert all(each == hashes[0] for each in hashes)


@pytest.mark.parametrize("connector", CONNECTORS)
def test_statistics(
    servers: Callable[[int], str], engines: Callable[..., Any], connector: str
) -> None:
    engine = engines(servers(64), Geometry("blocks_first"), connector=connector)
    engine.run_one(prompt(3, 200))
    assert engine.statistics


@pytest.mark.parametrize(
    "hook",
    [
        "build_kv_connector_stats",
        "build_prom_metrics",
        "get_kv_connector_kv_cache_events",
        "get_block_ids_with_load_errors",
        "take_events",
    ],
)
def test_hooks_are_lmcaches(hook: str) -> None:
    own = getattr(RBLNLMCacheConnectorV1, hook)
    theirs = getattr(LMCacheMPConnector, hook)
    assert getattr(own, "__func__", own) is getattr(theirs, "__func__", theirs)
