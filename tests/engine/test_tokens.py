# SPDX-License-Identifier: Apache-2.0
"""vLLM-RBLN's engine against transformers: the same greedy tokens, one by one."""

import pytest

from tests.engine import engines

pytestmark = pytest.mark.engine


def prompts(lengths=engines.LENGTHS):
    from tests.engine import models

    return [models.prompt(length, seed) for seed, length in enumerate(lengths)]


def local_hits(lengths):
    """vLLM reuses whole blocks, and computes at least one token."""
    return [(length - 1) // engines.BLOCK * engines.BLOCK for length in lengths]


@pytest.mark.parametrize(
    ("name", "settings", "llm"),
    [
        pytest.param("llama", {}, {}, id="blocks-first"),
        pytest.param(
            "llama", {}, {"additional_config": {"use_custom_kernel": True}}, id="kv-first"
        ),
        pytest.param("deepseek", {}, {}, id="latent-attention-and-experts"),
        pytest.param("mistral", {"RBLN_FORCE_NPU_NAME": "RBLN-CR13"}, {}, id="appending-window"),
    ],
)
def test_greedy_tokens_and_local_prefix_hits(tmp_path, model, reference, name, settings, llm):
    expected = [reference(name).tokens(p, 16) for p in prompts()]
    with engines.engine(tmp_path, model(name), settings=settings, **llm) as engine:
        cold = engine.generate(prompts())
        assert cold["tokens"] == expected
        assert cold["cached"] == [0] * len(expected)
        warm = engine.generate(prompts())
        assert warm["tokens"] == expected
        assert warm["cached"] == local_hits(engines.LENGTHS)
        # Prompts that go another way after a shared beginning.
        forks = [[*p[:n], 7, 8, 9] for p, n in zip(prompts()[-2:], (64, 200), strict=True)]
        forked = engine.generate(forks)
        assert forked["tokens"] == [reference(name).tokens(p, 16) for p in forks]
        if name != "mistral":  # blocks behind its window are given up early, and some are lost
            assert forked["cached"] == [64, 192]


def test_shifting_window(tmp_path, model, reference):
    expected = [reference("mistral").tokens(p, 40) for p in prompts()]
    with engines.engine(tmp_path, model("mistral")) as engine:
        for _ in range(2):
            out = engine.generate(prompts(), max_tokens=40)
            assert out["tokens"] == expected
            # One block a request, which nobody else can use.
            assert out["cached"] == [0] * len(expected)


def test_one_block_holds_a_whole_sequence(tmp_path, model, reference):
    """Then vLLM-RBLN takes its other attention operators, with another argument order."""
    with engines.engine(tmp_path, model("llama"), block_size=512) as engine:
        out = engine.generate(prompts())
    assert out["tokens"] == [reference("llama").tokens(p, 16) for p in prompts()]


@pytest.mark.parametrize("name", ["llama", "deepseek"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision(tmp_path, model, reference, name, dtype):
    with engines.engine(tmp_path, model(name), dtype=dtype) as engine:
        for _ in range(2):
            out = engine.generate(prompts())
            for prompt, tokens in zip(prompts(), out["tokens"], strict=True):
                assert reference(name, dtype).shortfall(prompt, tokens) < engines.ROUNDING


def test_fp8_cache(tmp_path, model, reference):
    ours = reference("llama", "float32", fp8_cache=True)
    with engines.engine(tmp_path, model("llama"), kv_cache_dtype="fp8") as engine:
        for _ in range(2):
            out = engine.generate(prompts())
            for prompt, tokens in zip(prompts(), out["tokens"], strict=True):
                assert ours.shortfall(prompt, tokens) < engines.ROUNDING


def test_default_start(tmp_path, model, reference):
    """Warm-up, dynamic sizing of the KV cache, asynchronous scheduling, a core of its own."""
    from tests.engine import processes

    with processes.Engine(
        tmp_path,
        options=("--memory-gb", "8"),
        model=str(model("llama")),
        model_impl="vllm",
        block_size=engines.BLOCK,
        max_model_len=256,
        max_num_batched_tokens=engines.PREFILL,
        max_num_seqs=2,
        dtype="float32",
        disable_log_stats=False,
    ) as engine:
        # 8 GiB would hold more; block ids are 16 bits wide.
        assert engine.num_gpu_blocks == 2**15 - 1
        assert "reallocating KV cache: 4 -> 32767 blocks" in engine.log()
        lengths = (5, 64, 129, 200)
        expected = [reference("llama").tokens(p, 16) for p in prompts(lengths)]
        assert engine.generate(prompts(lengths))["tokens"] == expected
        again = engine.generate(prompts(lengths), temperature=0.7, top_k=1)
        assert again["tokens"] == expected, "the only token that top_k=1 leaves is the greedy one"
        assert again["cached"] == local_hits(lengths)
        drawn = engine.generate(prompts(lengths), temperature=1.5, top_p=0.9)
        assert drawn["tokens"] != expected
