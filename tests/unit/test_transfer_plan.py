# SPDX-License-Identifier: Apache-2.0
"""Steps of a transfer: each byte once, none too large."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_rbln import transfer_plan
from lmcache_rbln.kv_layout import KVLayout, PagedKV
from lmcache_rbln.transfer_plan import plan


def paged(
    layout: KVLayout, layers: int, blocks: int, heads: int, block_size: int, head_size: int
) -> PagedKV:
    hnd = (heads, 1, block_size, head_size)
    shape = {
        KVLayout.BLOCKS_FIRST: (blocks, 2, *hnd),
        KVLayout.KV_FIRST: (2, blocks, *hnd),
        KVLayout.MLA: (blocks, block_size, head_size),
    }[layout]
    tensors = tuple(torch.empty(shape, dtype=torch.bfloat16) for _ in range(layers))
    return PagedKV(layout, tensors, blocks, heads, block_size, head_size)


def first_element(cache: PagedKV, block: int, plane: int, head: int, token: int) -> int:
    """Where a layer has the first element of a head of a token, by the layout's shape alone."""
    place = (plane, block) if cache.layout is KVLayout.KV_FIRST else (block, plane)
    shape = (cache.planes, cache.num_blocks)[:: 1 if cache.layout is KVLayout.KV_FIRST else -1]
    row = 0
    for index, size in zip(
        (*place, head, token), (*shape, cache.num_heads, cache.block_size), strict=True
    ):
        row = row * size + index
    return row * cache.head_size


@settings(max_examples=250)
@given(data=st.data(), layout=st.sampled_from(list(KVLayout)))
def test_every_byte_once_and_to_its_place(data: st.DataObject, layout: KVLayout) -> None:
    draw = data.draw
    heads = 1 if layout is KVLayout.MLA else draw(st.integers(1, 3))
    # Many, so that most steps have several.
    blocks = draw(st.sampled_from((12, 7, 3, 1)))
    cache = paged(
        layout, draw(st.integers(1, 5)), blocks, heads,
        draw(st.integers(1, 5)), draw(st.integers(1, 3)),
    )  # fmt: skip
    per_chunk = draw(st.sampled_from((1, 2, 4, 6)))
    ids = draw(st.permutations(range(blocks)))[: draw(st.integers(-(-blocks // 2), blocks))]
    skip = draw(st.sampled_from((0, 0, 0, 1, 3, 12)))
    token = cache.token_width * 2
    # Whole blocks of some layers, or slices of one plane of a block.
    if draw(st.booleans()):
        limit = draw(st.integers(token, cache.block_nbytes))
    else:
        limit = draw(st.integers(2, 8)) * cache.block_nbytes + draw(st.integers(0, token))
    chunks = -(-len(ids) // per_chunk)
    sizes = {
        name: draw(st.sampled_from((1, 3 * token, getattr(transfer_plan, name))))
        for name in ("_END_STEP", "_SMALL_STEP")
    }
    with mock.patch.multiple(transfer_plan, **sizes):
        steps = plan(cache, ids, chunks, per_chunk, skip, limit, draw(st.booleans()))

    moved: set[tuple[int, int, int, int]] = set()
    for step in steps:
        part = step.part
        assert 0 < step.num_elements * 2 <= limit
        assert step.num_elements == sum(step.lengths)
        assert step.lengths == tuple(length for _, length in part.runs) * len(step.layers)
        assert part.cut is None or runs_of(*part.cut) == list(part.runs)
        assert part.cut is not None or len(part.runs) < transfer_plan._FEW_RUNS
        staged = [start + at for start, length in part.runs for at in range(length)]
        assert len(staged) == part.num_tokens * len(part.planes) * cache.token_width
        for number in range(part.num_tokens):
            in_chunk = part.first_token + number
            position, in_block = divmod(in_chunk, cache.block_size)
            block = ids[part.chunk * per_chunk + position]
            which, rest = divmod(number, part.block_tokens)
            for plane in part.planes:
                place = (plane - part.planes.start) * part.plane_stride + which * part.block_stride
                for head in range(heads):
                    row = place + head * part.block_tokens + rest
                    first = row * cache.head_size
                    want = first_element(cache, block, plane, head, in_block)
                    assert staged[first : first + cache.head_size] == list(
                        range(want, want + cache.head_size)
                    )
                for layer in step.layers:
                    assert (part.chunk, layer, plane, in_chunk) not in moved
                    moved.add((part.chunk, layer, plane, in_chunk))
    count = max(0, len(ids) - skip)
    assert len(moved) == count * len(cache.layers) * cache.planes * cache.block_size


def runs_of(first: int, lengths: list[int], which: list[int]) -> list[tuple[int, int]]:
    """The runs that a cut gives."""
    starts = list(itertools.accumulate(lengths, initial=first))
    return [(starts[index], lengths[index]) for index in which]


def test_repeated_blocks_are_not_cut() -> None:
    cache = paged(KVLayout.BLOCKS_FIRST, 1, 10, 2, 4, 8)
    (step,) = plan(cache, [5, 3, 5, 3, 7], 1, 6, 0, 1 << 20, True)
    assert step.part.cut is None
    assert len(step.part.runs) == 5
    (step,) = plan(cache, [5, 3, 1, 7], 1, 6, 0, 1 << 20, True)
    assert step.part.cut is not None


def test_consecutive_blocks_are_one_run() -> None:
    cache = paged(KVLayout.BLOCKS_FIRST, 1, 10, 2, 4, 8)
    (step,) = plan(cache, [3, 4, 5, 9, 1, 2], 1, 6, 0, 1 << 20, True)
    block = cache.block_nbytes // 2
    assert step.part.runs == ((3 * block, 3 * block), (9 * block, block), (block, 2 * block))


def test_a_block_larger_than_a_step_moves_plane_by_plane() -> None:
    cache = paged(KVLayout.KV_FIRST, 1, 3, 2, 8, 16)
    plane = cache.block_nbytes // 2
    steps = plan(cache, [1], 1, 1, 0, plane, True)
    assert [list(step.part.planes) for step in steps] == [[0], [1]]
    assert all(len(step.part.runs) == 1 for step in steps)


@pytest.mark.parametrize("block_size", [16, 1024])
@pytest.mark.parametrize("gathering", [True, False])
def test_the_step_that_nothing_runs_beside_is_small(gathering: bool, block_size: int) -> None:
    blocks = 2048 // block_size
    cache = paged(KVLayout.BLOCKS_FIRST, 8, blocks, 8, block_size, 64)
    steps = plan(cache, list(range(blocks)), 1, blocks, 0, 8 << 20, gathering)
    sizes = [2 * step.num_elements for step in steps]
    if not gathering:
        sizes.reverse()
    assert max(sizes) == sizes[0] == 4 << 20
    assert sizes[-2:] == [2 << 20, 2 << 20]


@pytest.mark.parametrize("gathering", [True, False])
def test_it_is_cut_by_layers_first(gathering: bool) -> None:
    cache = paged(KVLayout.KV_FIRST, 32, 8, 8, 128, 64)
    steps = plan(cache, list(range(8)), 1, 8, 0, 8 << 20, gathering)
    if not gathering:
        steps.reverse()
    sizes = [len(step.layers) for step in steps]
    # Of the last layer, half its blocks at a time.
    assert sizes == [4] * 7 + [2, 1, 1, 1]


@pytest.mark.parametrize("layout", KVLayout)
@pytest.mark.parametrize("gathering", [True, False])
def test_a_small_transfer_is_one_step(layout: KVLayout, gathering: bool) -> None:
    cache = paged(layout, 4, 8, 1, 128, 64)
    assert sum(layer.nbytes for layer in cache.layers) in (1 << 19, 1 << 20)
    (step,) = plan(cache, list(range(8)), 1, 8, 0, 8 << 20, gathering)
    assert step.layers == range(4)


@pytest.mark.parametrize(
    ("layers", "sizes"), [(3, [2, 1]), (4, [2, 2]), (5, [3, 2]), (9, [5, 2, 2])]
)
@pytest.mark.parametrize("gathering", [True, False])
def test_it_is_halved_down_to_a_mebibyte(gathering: bool, layers: int, sizes: list[int]) -> None:
    cache = paged(KVLayout.BLOCKS_FIRST, layers, 4, 4, 128, 64)
    assert cache.layers[0].nbytes == 1 << 19
    with mock.patch.object(transfer_plan, "_SMALL_STEP", 8 << 20):
        steps = plan(cache, list(range(4)), 1, 4, 0, 8 << 20, gathering)
    if not gathering:
        steps.reverse()
    assert [len(step.layers) for step in steps] == sizes
    assert [layer for step in steps for layer in step.layers] == list(range(layers))


@pytest.mark.parametrize("gathering", [True, False])
def test_what_is_skipped_makes_no_step_larger(gathering: bool) -> None:
    cache = paged(KVLayout.BLOCKS_FIRST, 16, 16, 8, 128, 64)
    without = plan(cache, list(range(8, 16)), 1, 8, 0, 8 << 20, gathering)
    skipping = plan(cache, list(range(16)), 2, 8, 8, 8 << 20, gathering)
    assert [step.layers for step in skipping] == [step.layers for step in without]


def test_not_even_one_token_fits() -> None:
    cache = paged(KVLayout.MLA, 1, 3, 1, 8, 16)
    with pytest.raises(
        ValueError, match="room for 31 bytes at once, and one token of one layer is 32"
    ):
        plan(cache, [1], 1, 1, 0, 31, True)
