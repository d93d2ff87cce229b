# SPDX-License-Identifier: Apache-2.0
"""Every byte of a transfer, against a plain reference, through LMCache's own functions and ours."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import reference
from tests.reference import Geometry

#: Random geometries in all, over three layouts and both ways in.
EXAMPLES = 170


@st.composite
def geometries(draw: st.DrawFn, layout: str) -> Geometry:
    # Two blocks fit both HND layouts; that case has tests of its own.
    blocks = draw(st.integers(1, 9).filter(lambda n: n != 2 or layout == "mla"))
    block_size = draw(st.sampled_from([1, 2, 3, 4, 8, 16]))
    return Geometry(
        layout=layout,
        num_layers=draw(st.integers(1, 5)),
        num_blocks=blocks,
        num_heads=1 if layout == "mla" else draw(st.sampled_from([1, 2, 3, 8])),
        block_size=block_size,
        head_size=draw(st.sampled_from([1, 2, 5, 8, 16, block_size])),
        blocks_per_chunk=draw(st.integers(1, 4)),
        dtype=draw(st.sampled_from(reference.DTYPES)),
    )


@st.composite
def requests(draw: st.DrawFn, layout: str) -> tuple[Geometry, list[int], list[int], int, int, str]:
    """Geometry, ids to gather (may repeat), ids to scatter to (may not), skip, seed, device."""
    geometry = draw(geometries(layout))
    count = draw(st.integers(1, geometry.num_blocks))
    gathered = draw(
        st.lists(st.integers(0, geometry.num_blocks - 1), min_size=count, max_size=count)
    )
    scattered = draw(st.permutations(range(geometry.num_blocks)))[:count]
    skip = draw(st.integers(0, count + 1))
    device = draw(st.sampled_from(["rbln:0", "rbln:1"]))
    return geometry, gathered, list(scattered), skip, draw(st.integers(0, 2**32 - 1)), device


def lmcache_functions() -> tuple[Callable[..., Any], Callable[..., Any]]:
    from lmcache.v1.multiprocess.transfer_context.base import (
        gather_paged_kv_to_cpu,
        scatter_cpu_to_paged_kv,
    )

    return gather_paged_kv_to_cpu, scatter_cpu_to_paged_kv


def on_device(layers: list[torch.Tensor], device: str) -> dict[str, torch.Tensor]:
    return {f"layer.{index}": layer.to(device) for index, layer in enumerate(layers)}


@pytest.mark.parametrize("layout", reference.LAYOUTS)
@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_through_device_ops(
    layout: str, data: st.DataObject, transfer: Callable[..., None]
) -> None:
    """Gather and scatter, last chunk short, in a chunk buffer sized for more; skip on both ways."""
    geometry, gathered, scattered, skip, seed, device = data.draw(requests(layout))
    rng = np.random.default_rng(seed)
    layers = geometry.layers(rng)
    bpc, block = geometry.blocks_per_chunk, geometry.block_size
    counts = [min(bpc, len(gathered) - first) for first in range(0, len(gathered), bpc)]
    spare = int(rng.integers(0, 3))
    buffers = [geometry.random(geometry.chunk_shape(n * block + spare), rng) for n in counts]
    chunks = [buffer[..., : n * block, :] for buffer, n in zip(buffers, counts, strict=True)]
    options = {"block_size": block, "chunk_tokens": geometry.chunk_tokens, "mla": layout == "mla"}

    expected = [reference.to_bytes(buffer) for buffer in buffers]
    cache = [layer.to(device) for layer in layers]
    reference.gather(geometry, [reference.to_bytes(x) for x in layers], expected, gathered, skip)
    transfer("gather", cache, chunks, gathered, skip=skip, **options)
    for buffer, want in zip(buffers, expected, strict=True):
        assert np.array_equal(reference.to_bytes(buffer), want)

    other = geometry.layers(rng)
    want_layers = [reference.to_bytes(layer) for layer in other]
    reference.scatter(geometry, want_layers, expected, scattered, skip)
    cache = [layer.to(device) for layer in other]
    transfer("scatter", cache, chunks, torch.tensor(scattered), skip=skip, **options)
    for layer, want in zip(cache, want_layers, strict=True):
        assert np.array_equal(reference.to_bytes(layer), want)


@pytest.mark.parametrize("layout", reference.LAYOUTS)
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_through_lmcache(layout: str, data: st.DataObject) -> None:
    """LMCache's own gather and scatter: whole chunks, the layout found by its detector."""
    geometry, gathered, scattered, skip, seed, device = data.draw(requests(layout))
    bpc = min(geometry.blocks_per_chunk, len(gathered))
    whole = len(gathered) // bpc * bpc
    geometry = Geometry(**{**geometry.__dict__, "blocks_per_chunk": bpc})
    gathered, scattered, skip = gathered[:whole], scattered[:whole], min(skip, whole)
    rng = np.random.default_rng(seed)
    layers = geometry.layers(rng)
    gather, scatter = lmcache_functions()

    chunks = gather(on_device(layers, device), gathered, bpc)
    expected = [
        reference.to_bytes(torch.zeros(geometry.chunk_shape(), dtype=geometry.dtype))
        for _ in chunks
    ]
    reference.gather(geometry, [reference.to_bytes(x) for x in layers], expected, gathered)
    for chunk, want in zip(chunks, expected, strict=True):
        assert tuple(chunk.shape) == geometry.chunk_shape()
        assert np.array_equal(reference.to_bytes(chunk), want)

    other = geometry.layers(rng)
    want_layers = [reference.to_bytes(layer) for layer in other]
    reference.scatter(geometry, want_layers, expected, scattered, skip)
    cache = on_device(other, device)
    scatter(cache, scattered, chunks, bpc, skip_first_n_tokens=skip * geometry.block_size)
    for layer, want in zip(cache.values(), want_layers, strict=True):
        assert np.array_equal(reference.to_bytes(layer), want)


@pytest.mark.parametrize("layout", ["blocks_first", "kv_first"])
def test_two_blocks_with_the_setting(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMCACHE_RBLN_KV_LAYOUT", layout)
    geometry = Geometry(layout, 2, 2, 2, 4, 4, 1)
    rng = np.random.default_rng(1)
    layers = geometry.layers(rng)
    gather, scatter = lmcache_functions()
    chunks = gather(on_device(layers, "rbln:0"), [1, 0], 1)
    expected = [reference.to_bytes(chunk) * 0 for chunk in chunks]
    reference.gather(geometry, [reference.to_bytes(x) for x in layers], expected, [1, 0])
    assert all(
        np.array_equal(reference.to_bytes(c), w) for c, w in zip(chunks, expected, strict=True)
    )
    cache = on_device(geometry.layers(rng), "rbln:0")
    scatter(cache, [1, 0], chunks, 1)
    for layer, want in zip(cache.values(), layers, strict=True):
        assert np.array_equal(reference.to_bytes(layer), reference.to_bytes(want))


def test_the_same_request_from_eight_threads(transfer: Callable[..., None]) -> None:
    """Several transfers at once on one operations object, each with its own right result."""
    geometry = Geometry("blocks_first", 4, 9, 2, 16, 16, 3)
    rng = np.random.default_rng(2)
    layers = geometry.layers(rng)
    cache = [layer.to("rbln:0") for layer in layers]
    plain = [reference.to_bytes(layer) for layer in layers]
    wrong: list[int] = []

    def work(number: int) -> None:
        own = np.random.default_rng(number)
        for _ in range(10):
            ids = own.integers(0, 9, 6).tolist()
            chunks = [geometry.random(geometry.chunk_shape(), own) for _ in range(2)]
            transfer("gather", cache, chunks, ids, block_size=16, chunk_tokens=48)
            want = [reference.to_bytes(chunk) * 0 for chunk in chunks]
            reference.gather(geometry, plain, want, ids)
            if not all(
                np.array_equal(reference.to_bytes(c), w) for c, w in zip(chunks, want, strict=True)
            ):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("layout", reference.LAYOUTS)
def test_no_transfer_hands_device_memory_to_the_host(
    layout: str, transfer: Callable[..., None]
) -> None:
    """torch-rbln's fall-backs borrow device memory behind an operation; none may be taken."""
    from lmcache_rbln import simulator

    geometry = Geometry(layout, 3, 5, 2, 8, 16, 2)
    rng = np.random.default_rng(3)
    cache = [layer.to("rbln:0") for layer in geometry.layers(rng)]
    chunks = [geometry.random(geometry.chunk_shape(), rng) for _ in range(2)]
    simulator.reset_counters()
    for direction in ("gather", "scatter"):
        transfer(
            direction,
            cache,
            chunks,
            [3, 0, 4, 1],
            block_size=8,
            chunk_tokens=16,
            mla=layout == "mla",
        )
    assert simulator.counters()["borrow"]["submissions"] == 0
