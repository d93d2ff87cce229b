# SPDX-License-Identifier: Apache-2.0
"""What a transfer moves, cut into steps that each fit a staging buffer.

A step is some tokens of one chunk in some layers. Its tokens are whole blocks or, where even one
block of one layer is larger than a staging buffer, some tokens of one plane of a block. Copies no
data and touches no device.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lmcache_rbln.kv_layout import KVLayout, PagedKV

#: A transfer has at least so many steps, which can overlap, unless they are smaller than this.
_LEAST_STEPS = 8
_SMALL_STEP = 2 << 20

#: The step that nothing runs beside is cut into smaller and smaller ones, down to about this: less
#: is a copy whose fixed cost takes longer than what it hides.
_END_STEP = 1 << 20

#: From so many runs on, one cut of a layer costs less than a view of each: besides the time, a view
#: gives the interpreter's lock away and has to get it back.
_FEW_RUNS = 4


class Part(NamedTuple):
    """Tokens of a chunk, and where each layer of the cache has them.

    Staging holds a layer's runs end to end, in rows of one head of one token: by head, then token,
    within a block and plane.

    Attributes:
        chunk: The chunk's place in the list of chunks.
        first_token: First token in the chunk.
        num_tokens: How many.
        planes: Which planes of the chunk.
        runs: Start and length, in elements of a layer, of each contiguous run.
        cut: How to get all runs by cutting a layer once: where to start, the lengths of the pieces,
            and which pieces are the runs. None where runs are few, or blocks repeat.
        block_tokens: Tokens of one block.
        block_stride: Rows in staging from one block to the next.
        plane_stride: Rows in staging from one plane to the next.
    """

    chunk: int
    first_token: int
    num_tokens: int
    planes: range
    runs: tuple[tuple[int, int], ...]
    cut: tuple[int, list[int], list[int]] | None
    block_tokens: int
    block_stride: int
    plane_stride: int


class Step(NamedTuple):
    """A part in some layers: what is moved at once.

    Attributes:
        part: The part.
        layers: Which layers.
        lengths: Elements of each run of each layer, in staging order.
        num_elements: Their sum.
    """

    part: Part
    layers: range
    lengths: tuple[int, ...]
    num_elements: int


def plan(
    paged: PagedKV,
    block_ids: Sequence[int],
    num_chunks: int,
    blocks_per_chunk: int,
    skip_blocks: int,
    step_nbytes: int,
    gathering: bool,
) -> list[Step]:
    """Cut a transfer into steps, in the order in which they are best started.

    Args:
        paged: The cache.
        block_ids: Blocks in token order.
        num_chunks: How many chunks they are divided among.
        blocks_per_chunk: Blocks of each chunk but the last.
        skip_blocks: Blocks at the start, counted across chunks, that do not move.
        step_nbytes: Bytes that a step may have at most.
        gathering: Whether blocks become chunks.

    Raises:
        ValueError: Not even one token of one plane and layer fits a step.
    """
    itemsize = paged.dtype.itemsize
    num_layers = len(paged.layers)
    total = (len(block_ids) - skip_blocks) * paged.block_nbytes * num_layers
    wanted = min(step_nbytes, max(_SMALL_STEP, total // _LEAST_STEPS))
    steps: list[Step] = []
    for chunk in range(num_chunks):
        start = chunk * blocks_per_chunk
        begin = max(start, skip_blocks)
        blocks = block_ids[begin : start + blocks_per_chunk]
        for part in _parts(paged, chunk, begin - start, blocks, step_nbytes):
            per_layer = sum(length for _, length in part.runs)
            at_once = max(1, wanted // (per_layer * itemsize))
            steps += [_step(part, layers) for layers in _groups(num_layers, at_once)]
    if paged.layout is KVLayout.MLA or not steps:
        return steps
    # Nothing is on the link beside the transpose of the last step of a gather, or of the first of a
    # scatter: it is to be short.
    if gathering:
        return steps[:-1] + _tapered(paged, steps[-1], block_ids, blocks_per_chunk)
    return _tapered(paged, steps[0], block_ids, blocks_per_chunk)[::-1] + steps[1:]


def _tapered(
    paged: PagedKV, step: Step, block_ids: Sequence[int], blocks_per_chunk: int
) -> list[Step]:
    """A step as several, each about half of the one before."""
    itemsize = paged.dtype.itemsize
    tapered: list[Step] = []
    layers = step.layers
    per_layer = step.num_elements // len(layers)
    while len(layers) > 1 and per_layer * len(layers) * itemsize > _END_STEP:
        half = (len(layers) + 1) // 2
        tapered.append(_step(step.part, layers[:half]))
        layers = layers[half:]
    part = step.part
    if per_layer * itemsize > _END_STEP and len(part.planes) == paged.planes:
        first_block = part.first_token // paged.block_size
        start = part.chunk * blocks_per_chunk + first_block
        blocks = block_ids[start : start + part.num_tokens // paged.block_size]
        half_layer = max(_END_STEP, per_layer * itemsize // 2)
        parts = _parts(paged, part.chunk, first_block, blocks, half_layer)
        return tapered + [_step(part, layers) for part in parts]
    return [*tapered, _step(part, layers)]


def _step(part: Part, layers: range) -> Step:
    lengths = tuple(length for _, length in part.runs)
    return Step(part, layers, lengths * len(layers), sum(lengths) * len(layers))


def _parts(
    paged: PagedKV, chunk: int, first_block: int, blocks: Sequence[int], limit: int
) -> Iterator[Part]:
    """The tokens of some blocks, in parts of which one layer has ``limit`` bytes at most."""
    at_once = limit // paged.block_nbytes
    if at_once:
        for begin in range(0, len(blocks), at_once):
            some = blocks[begin : begin + at_once]
            yield _whole_blocks(paged, chunk, first_block + begin, some)
        return
    token_nbytes = paged.token_width * paged.dtype.itemsize
    tokens = min(paged.block_size, limit // token_nbytes)
    if not tokens:
        raise ValueError(
            f"staging has room for {limit} bytes at once, and one token of one layer is "
            f"{token_nbytes}; raise LMCACHE_RBLN_STAGING_MB and LMCACHE_RBLN_DEVICE_STAGING_MB"
        )
    for position, block in enumerate(blocks, first_block):
        for plane in range(paged.planes):
            for start in range(0, paged.block_size, tokens):
                end = min(paged.block_size, start + tokens)
                yield _slice(paged, chunk, position, block, plane, range(start, end))


def _whole_blocks(paged: PagedKV, chunk: int, first_block: int, blocks: Sequence[int]) -> Part:
    plane_rows = paged.num_heads * paged.block_size
    plane_elements = plane_rows * paged.head_size
    joined = _joined(blocks)
    if paged.layout is KVLayout.KV_FIRST:
        runs = tuple(
            ((plane * paged.num_blocks + first) * plane_elements, count * plane_elements)
            for plane in range(2)
            for first, count in joined
        )
        block_stride, plane_stride = plane_rows, len(blocks) * plane_rows
    else:
        block_elements = paged.planes * plane_elements
        runs = tuple((first * block_elements, count * block_elements) for first, count in joined)
        block_stride, plane_stride = paged.planes * plane_rows, plane_rows
    return Part(
        chunk=chunk,
        first_token=first_block * paged.block_size,
        num_tokens=len(blocks) * paged.block_size,
        planes=range(paged.planes),
        runs=runs,
        cut=_cut(runs),
        block_tokens=paged.block_size,
        block_stride=block_stride,
        plane_stride=plane_stride,
    )


def _slice(
    paged: PagedKV, chunk: int, position: int, block: int, plane: int, tokens: range
) -> Part:
    if paged.layout is KVLayout.KV_FIRST:
        before = plane * paged.num_blocks + block
    else:
        before = block * paged.planes + plane
    first_row = before * paged.num_heads * paged.block_size
    if len(tokens) == paged.block_size:
        row_runs = [(first_row, paged.num_heads * paged.block_size)]
    else:
        row_runs = [
            (first_row + head * paged.block_size + tokens.start, len(tokens))
            for head in range(paged.num_heads)
        ]
    runs = tuple((row * paged.head_size, count * paged.head_size) for row, count in row_runs)
    return Part(
        chunk=chunk,
        first_token=position * paged.block_size + tokens.start,
        num_tokens=len(tokens),
        planes=range(plane, plane + 1),
        runs=runs,
        cut=_cut(runs),
        block_tokens=len(tokens),
        block_stride=0,
        plane_stride=0,
    )


def _joined(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of consecutive ids, as first id and count."""
    runs: list[tuple[int, int]] = []
    first = previous = blocks[0]
    for block in blocks[1:]:
        if block != previous + 1:
            runs.append((first, previous + 1 - first))
            first = block
        previous = block
    runs.append((first, previous + 1 - first))
    return runs


def _cut(runs: Sequence[tuple[int, int]]) -> tuple[int, list[int], list[int]] | None:
    if len(runs) < _FEW_RUNS:
        return None
    pieces: list[int] = []
    which = [0] * len(runs)
    first = reached = min(runs)[0]
    for index in sorted(range(len(runs)), key=runs.__getitem__):
        start, length = runs[index]
        if start < reached:
            return None
        if start > reached:
            pieces.append(start - reached)
        which[index] = len(pieces)
        pieces.append(length)
        reached = start + length
    return first, pieces, which


def _groups(num_layers: int, at_most: int) -> list[range]:
    """All layers, in groups of sizes as equal as can be."""
    count = -(-num_layers // at_most)
    bounds = [num_layers * i // count for i in range(count + 1)]
    return [range(a, b) for a, b in itertools.pairwise(bounds)]
