# SPDX-License-Identifier: Apache-2.0
"""Random requests with shared prefixes on a pool so small that requests are preempted all the
time. A hang is a failure that prints every stack of every process."""

import random

import pytest

from tests.engine import engines

pytestmark = pytest.mark.engine


def load(seed, requests=24):
    """Prompts that share beginnings of any length with others."""
    from tests.engine import models

    rng = random.Random(seed)
    bases = [models.prompt(320, seed=1000 * seed + i) for i in range(4)]
    return [
        rng.choice(bases)[: rng.randrange(1, 320)]
        + models.prompt(rng.randrange(1, 100), seed=1000 * seed + 100 + i)
        for i in range(requests)
    ]


@pytest.mark.parametrize("connector", ["RBLNLMCacheConnectorV1", "LMCacheMPConnector", None])
def test_preemption(tmp_path, model, reference, server, connector):
    usual = {} if connector is None else {"kv_transfer_config": server.connector(connector)}
    with engines.engine(
        tmp_path / "engine",
        model("llama"),
        settings={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        options=("--delay-us", "500"),
        watched=[server],
        num_gpu_blocks_override=18,
        **usual,
    ) as engine:
        preemptions = 0
        for seed in range(2):
            prompts = load(seed)
            out = engine.generate(prompts, max_tokens=60, metrics=True)
            preemptions = out["metrics"]["vllm:num_preemptions"]
            for prompt, tokens in zip(prompts, out["tokens"], strict=True):
                # Every token is the reference's own choice, up to ties of the last bit.
                assert len(tokens) == 60
                assert reference("llama").shortfall(prompt, tokens) < 1e-3
        assert preemptions >= 10, "the pool is too large to stress anything"
        assert connector is None or sum(out["cached"]) > 0
