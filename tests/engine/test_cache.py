# SPDX-License-Identifier: Apache-2.0
"""Reuse through a real `lmcache server`: the same tokens, and what was stored is hit."""

import contextlib

import pytest

from tests.engine import engines, processes

pytestmark = pytest.mark.engine

# Shorter than a chunk, a chunk, one token more than two, several chunks and the rest of one.
LENGTHS = (5, 64, 129, 301)


def prompts(first_seed=0):
    from tests.engine import models

    return [models.prompt(length, first_seed + i) for i, length in enumerate(LENGTHS)]


def hits(chunk=64):
    return [engines.reusable(length, chunk) for length in LENGTHS]


@contextlib.contextmanager
def cached_engine(folder, model, server, connector="RBLNLMCacheConnectorV1", **llm):
    """An engine that uses the server. Blocks are never reused locally unless `llm` says so: then
    every hit came from the server."""
    with engines.engine(
        folder,
        model,
        watched=[server],
        **{
            "enable_prefix_caching": False,
            "kv_transfer_config": server.connector(connector),
            **llm,
        },
    ) as engine:
        yield engine


def cold_and_warm(engine, server, expected, chunk=64, ranks=1):
    """Prompts the server has not seen, then the same again."""
    cold = engine.generate(prompts())
    assert cold["tokens"] == expected
    assert cold["cached"] == [0] * len(LENGTHS)
    server.wait_for(ranks * engines.chunks(LENGTHS, chunk))
    warm = engine.generate(prompts())
    assert warm["tokens"] == expected
    assert "server is unhealthy" not in engine.log(), "the engine took the server for lost"
    assert warm["cached"] == hits(chunk)


@pytest.mark.parametrize(
    ("name", "connector", "llm"),
    [
        pytest.param("llama", "RBLNLMCacheConnectorV1", {}, id="blocks-first"),
        pytest.param(
            "llama",
            "RBLNLMCacheConnectorV1",
            {"additional_config": {"use_custom_kernel": True}},
            id="kv-first",
        ),
        pytest.param("deepseek", "RBLNLMCacheConnectorV1", {}, id="mla"),
        pytest.param("llama", "LMCacheMPConnector", {}, id="lmcache-connector"),
    ],
)
def test_every_layout(tmp_path, model, reference, server, name, connector, llm):
    expected = [reference(name).tokens(p, 16) for p in prompts()]
    with cached_engine(tmp_path / "engine", model(name), server, connector, **llm) as engine:
        cold_and_warm(engine, server, expected)


def test_fp8_cache(tmp_path, model, reference, server):
    ours = reference("llama", "float32", fp8_cache=True)
    with cached_engine(tmp_path / "engine", model("llama"), server, kv_cache_dtype="fp8") as engine:
        cold = engine.generate(prompts())
        server.wait_for(engines.chunks(LENGTHS))
        warm = engine.generate(prompts())
    assert cold["cached"] == [0] * len(LENGTHS)
    assert warm["cached"] == hits()
    for out in (cold, warm):
        for prompt, tokens in zip(prompts(), out["tokens"], strict=True):
            assert ours.shortfall(prompt, tokens) < engines.ROUNDING


@pytest.mark.parametrize("npu", ["RBLN-CR03", "RBLN-CR13"])
def test_a_sliding_window_is_refused(tmp_path, model, server, npu):
    """Its blocks shift (CR03) or are given up (CR13): a hit would be of other tokens' values."""
    settings = {"RBLN_FORCE_NPU_NAME": npu}
    with (
        pytest.raises(processes.EndedError, match="RBLNSlidingWindowSpec|SlidingWindowSpec"),
        cached_engine(tmp_path / "engine", model("mistral"), server, settings=settings),
    ):
        pass


def test_bytes_altered_in_the_server_alter_the_tokens(tmp_path, model, reference, server):
    """The control of all the others: hits do come from what the server holds."""
    expected = [reference("llama").tokens(p, 16) for p in prompts()]
    with cached_engine(tmp_path / "engine", model("llama"), server) as engine:
        engine.generate(prompts())
        server.wait_for(engines.chunks(LENGTHS))
        pool = server.process.shm_path
        data = bytearray(pool.read_bytes())
        # The sign of every stored float32; zero bytes are memory never written.
        data[3::4] = bytes(byte ^ 0x80 if byte else 0 for byte in data[3::4])
        with pool.open("r+b") as file:
            file.write(data)
        warm = engine.generate(prompts())
        assert warm["cached"] == hits(), "the altered chunks were not used"
        assert warm["tokens"][0] == expected[0], "nothing of the shortest prompt was stored"
        for prompt, tokens, right in zip(
            prompts()[1:], warm["tokens"][1:], expected[1:], strict=True
        ):
            assert tokens != right
            assert reference("llama").shortfall(prompt, tokens) > engines.ROUNDING


def test_another_engine_hits_and_delays_change_nothing(tmp_path, model, reference, server):
    """A core process of its own, warm-up, dynamic KV sizing, prefix caching, asynchronous copies
    that start late."""
    expected = [reference("llama").tokens(p, 16) for p in prompts()]
    usual = {
        "enable_prefix_caching": True,
        "num_gpu_blocks_override": None,
        "options": ("--memory-gb", "8", "--delay-us", "3000"),
        "settings": {"VLLM_RBLN_ENABLE_WARM_UP": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    }
    with cached_engine(tmp_path / "first", model("llama"), server, **usual) as engine:
        assert engine.generate(prompts())["tokens"] == expected
        server.wait_for(engines.chunks(LENGTHS))
    with cached_engine(tmp_path / "second", model("llama"), server, **usual) as engine:
        warm = engine.generate(prompts())
        assert warm["tokens"] == expected
        assert warm["cached"] == hits()
        # Half of a stored prompt, then something new; a chunk is also a block here.
        fork = [*prompts()[3][:150], 7, 8, 9]
        forked = engine.generate([fork])
        assert forked["tokens"] == [reference("llama").tokens(fork, 16)]
        assert forked["cached"] == [128]


def test_two_ranks_on_two_npus(tmp_path, model, reference, server):
    expected = [reference("llama").tokens(p, 16) for p in prompts()]
    with cached_engine(
        tmp_path / "engine",
        model("llama"),
        server,
        tensor_parallel_size=2,
        options=("--npus", "2"),
        settings={
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            # Else each rank has a share of the cores for itself: on two, all there are.
            "VLLM_RBLN_NUMA": "0",
        },
    ) as engine:
        cold_and_warm(engine, server, expected, ranks=2)


def test_chunks_of_several_blocks(tmp_path, model, reference, new_server):
    server = new_server(chunk_size=128)
    expected = [reference("llama").tokens(p, 16) for p in prompts()]
    with cached_engine(
        tmp_path / "engine", model("llama"), server, block_size=32, num_gpu_blocks_override=96
    ) as engine:
        cold_and_warm(engine, server, expected, chunk=128)
