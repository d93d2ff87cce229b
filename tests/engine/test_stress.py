# SPDX-License-Identifier: Apache-2.0
"""Random requests with shared prefixes on a pool so small that requests are preempted all the
time. A hang is a failure that prints every stack of every process."""

import random

import pytest

from tests.engine import engines, processes

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


def three_that_stall(engine, server, seconds, attempt=0):
    """Requests of 8 blocks, on 17: one with 1 block stored, then two with 7. Once all of them are
    loaded the first needs 7 blocks, 2 are free, and nothing that runs will give any back."""
    from tests.engine import models

    prompts = [models.prompt(505, 10 * attempt + seed) for seed in (1, 2, 3)]
    for prompt in (prompts[0][:70], *prompts[1:]):
        engine.generate([prompt], max_tokens=1)
    server.wait_for((attempt + 1) * (1 + 7 + 7))
    return prompts, engine.generate(prompts, max_tokens=1, seconds=seconds)


def small_pool(folder, model, server, connector):
    return engines.engine(
        folder,
        model,
        watched=[server],
        num_gpu_blocks_override=18,
        enable_prefix_caching=False,
        kv_transfer_config=server.connector(connector),
    )


def test_loads_that_need_more_than_the_pool(tmp_path, model, reference, server):
    with small_pool(
        tmp_path / "engine", model("llama"), server, "RBLNLMCacheConnectorV1"
    ) as engine:
        prompts, out = three_that_stall(engine, server, processes.ANSWER_SECONDS)
    assert out["cached"] == [64, 448, 448]
    assert out["tokens"] == [reference("llama").tokens(prompt, 1) for prompt in prompts]


def test_the_scheduler_alone_stalls(tmp_path, model, server):
    """The control: with LMCache's connector, which reserves nothing, the engine takes empty steps
    for ever. When this fails, vLLM-RBLN's scheduler has the reservation of vLLM's own, and the
    connector's can go."""
    with (
        small_pool(tmp_path / "engine", model("llama"), server, "LMCacheMPConnector") as engine,
        pytest.raises(processes.HangError, match=r"llm_engine\.py.* in step"),
    ):
        # Where the first has been computed before the others are loaded, nothing stalls.
        for attempt in range(4):
            three_that_stall(engine, server, seconds=60, attempt=attempt)


@pytest.mark.parametrize("connector", ["RBLNLMCacheConnectorV1", None])
def test_preemption(tmp_path, model, reference, server, connector):
    usual = {} if connector is None else {"kv_transfer_config": server.connector(connector)}
    with engines.engine(
        tmp_path / "engine",
        model("llama"),
        settings={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        options=("--delay-us", "500"),
        watched=[server],
        num_gpu_blocks_override=15,
        **usual,
    ) as engine:
        preemptions = 0
        for seed in range(2):
            prompts = load(seed)
            out = engine.generate(prompts, max_tokens=60)
            preemptions = out["metrics"]["vllm:num_preemptions"]
            for prompt, tokens in zip(prompts, out["tokens"], strict=True):
                # Every token is the reference's own choice, up to ties of the last bit.
                assert len(tokens) == 60
                assert reference("llama").shortfall(prompt, tokens) < 1e-3
        assert preemptions >= 8, "the pool is too large to stress anything"
        assert connector is None or sum(out["cached"]) > 0
