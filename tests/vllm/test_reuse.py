# SPDX-License-Identifier: Apache-2.0
"""What one engine stored, it or another one loads: every layout, both connectors.

Each step of a worker checks all KV that its requests have so far, byte by byte, before it writes
more: a wrong load, a wrong store or a block reused too early fails the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from vllm_harness.engine import CONNECTORS, prompt
from vllm_harness.kv import LAYOUTS, Geometry

CHUNK = 64

every_connector = pytest.mark.parametrize("connector", CONNECTORS)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)

Servers = Callable[[int], str]
Engines = Callable[..., Any]


@every_connector
@every_layout
def test_prefixes(servers: Servers, engines: Engines, connector: str, layout: str) -> None:
    """Cold, then warm, then a part of the prefix, then prompts around a chunk's end."""
    engine = engines(servers(CHUNK), Geometry(layout), connector=connector)
    tokens = prompt(1, 200)
    cold = engine.run_one(tokens, max_tokens=4)
    engine.forget_local_cache()
    warm = engine.run_one(tokens, max_tokens=4)
    assert engine.loaded.get(cold) is None
    assert engine.loaded[warm] == 192
    assert engine.generated(cold) == engine.generated(warm)

    engine.forget_local_cache()
    branched = engine.run_one([*tokens[:100], *prompt(2, 90)])
    assert engine.loaded[branched] == 64

    for length, loaded in ((CHUNK - 1, None), (CHUNK, CHUNK - 1), (CHUNK + 1, CHUNK)):
        engine.forget_local_cache()
        request = engine.run_one(tokens[:length], max_tokens=2)
        # Of a prompt that is all in the cache the last token is computed again.
        assert engine.loaded.get(request) == loaded
    engine.check_over()


@every_connector
@every_layout
def test_two_engines_share_a_server(
    servers: Servers, engines: Engines, connector: str, layout: str
) -> None:
    geometry = Geometry(layout)
    first = engines(servers(CHUNK), geometry, connector=connector, workers=(0,))
    second = engines(servers(CHUNK), geometry, connector=connector, workers=(1,))
    stored = first.run_one(prompt(1, 200), max_tokens=3)
    loaded = second.run_one(prompt(1, 200), max_tokens=3)
    assert second.loaded[loaded] == 192
    assert second.generated(loaded) == first.generated(stored)
    back = second.run_one(prompt(2, 130))
    assert second.loaded.get(back) is None
    assert first.loaded[first.run_one(prompt(2, 130))] == 128
    first.check_over()
    second.check_over()


@every_connector
@every_layout
def test_tensor_parallel(servers: Servers, engines: Engines, connector: str, layout: str) -> None:
    """Two ranks on two NPUs. MLA ranks hold the same KV: one stores, both load."""
    engine = engines(servers(CHUNK), Geometry(layout), connector=connector, workers=(0, 1))
    tokens = prompt(3, 150)
    engine.run_one(tokens)
    engine.forget_local_cache()
    assert engine.loaded[engine.run_one(tokens)] == 128
    engine.check_over()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "uint8", "float32"])
@every_connector
@every_layout
def test_dtypes(
    servers: Servers, engines: Engines, connector: str, layout: str, dtype: str
) -> None:
    engine = engines(servers(CHUNK), Geometry(layout, dtype=dtype), connector=connector)
    engine.run_one(prompt(4, 140))
    engine.forget_local_cache()
    assert engine.loaded[engine.run_one(prompt(4, 140))] == 128
    engine.check_over()


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("block_size", [16, 128, 1024])
@every_connector
@every_layout
def test_block_sizes(
    servers: Servers, engines: Engines, connector: str, layout: str, block_size: int, chunks: int
) -> None:
    """A chunk of one block and of four; a local hit that ends inside a chunk.

    The blocks of the local hit belong to other requests too: the load must not touch them. They
    are overwritten here, so that it shows if it does.
    """
    chunk = block_size * chunks
    geometry = Geometry(layout, block_size=block_size, num_blocks=16, head_size=4)
    engine = engines(
        servers(chunk), geometry, connector=connector, max_batched_tokens=max(512, block_size)
    )
    tokens = prompt(5, chunk + block_size // 2)
    engine.run_one(tokens)
    engine.forget_local_cache()
    if chunks == 1:
        assert engine.loaded[engine.run_one(tokens)] == chunk
        engine.check_over()
        return
    engine.run_one(tokens[: 2 * block_size + 1])
    assert engine.loaded == {}
    late = engine.add(tokens)
    output, rows = engine.schedule_load(late)
    assert engine.loaded[late] == 2 * block_size
    shared, rest = engine.blocks(late)[:2], engine.blocks(late)[2:4]
    for block in (*shared, *rest):
        engine.workers[0].call("fill", block, 0x5A)
    engine.send(output, rows)
    engine.receive(output, rows)
    for block in shared:
        assert engine.workers[0].call("holds_only", block, 0x5A)
    for block in rest:
        assert not engine.workers[0].call("holds_only", block, 0x5A)
    engine.abort(late)
    engine.run()
    engine.check_over()
