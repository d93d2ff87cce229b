# SPDX-License-Identifier: Apache-2.0
"""With vLLM-RBLN 0.12.0's own scheduler: no mixed batches, and its sub-block prefix cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from vllm_harness.engine import CONNECTORS, prompt
from vllm_harness.kv import LAYOUTS, Geometry
from vllm_rbln.config import RBLNConfig
from vllm_rbln.v1.core.rbln_kv_cache_manager import RBLNKVCacheManager
from vllm_rbln.v1.core.rbln_scheduler import RBLNScheduler

every_connector = pytest.mark.parametrize("connector", CONNECTORS)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


@pytest.fixture
def rbln_engines(engines: Callable[..., Any]) -> Callable[..., Any]:
    def make(url: str, layout: str, **rest: Any) -> Any:
        return engines(
            url,
            Geometry(layout, block_size=128, num_blocks=12),
            scheduler=RBLNScheduler,
            additional_config=RBLNConfig(sub_block_size=32),
            max_batched_tokens=32,
            **rest,
        )

    return make


@every_connector
@every_layout
def test_reuse_and_preemption(
    servers: Callable[[int], str], rbln_engines: Callable[..., Any], connector: str, layout: str
) -> None:
    engine = rbln_engines(servers(128), layout, connector=connector)
    tokens = prompt(1, 300)
    cold = engine.run_one(tokens, max_tokens=4)
    engine.forget_local_cache()
    warm = engine.run_one(tokens, max_tokens=4)
    assert engine.loaded[warm] == 256
    assert engine.generated(cold) == engine.generated(warm)
    # 11 blocks: four requests that need three each, and more as they go on.
    for seed in range(2, 6):
        engine.add(prompt(seed, 250), max_tokens=150)
    engine.run(timeout=120)
    assert engine.preemptions
    engine.check_over()


@every_connector
@every_layout
def test_tokens_of_the_sub_block_cache_count(
    servers: Callable[[int], str], rbln_engines: Callable[..., Any], connector: str, layout: str
) -> None:
    """Tokens copied from another block are computed tokens; LMCache's connector forgets them."""
    engine = rbln_engines(servers(128), layout, connector=connector, workers=(0,))
    assert isinstance(engine.scheduler.kv_cache_manager, RBLNKVCacheManager)
    other = rbln_engines(servers(128), layout, connector=connector, workers=(1,))
    tokens = prompt(7, 300)
    engine.run_one(tokens[:100])
    engine.run_one(tokens)
    assert other.loaded[other.run_one(tokens)] == (256 if connector == "rbln" else 128)
    engine.check_over()
    other.check_over()
