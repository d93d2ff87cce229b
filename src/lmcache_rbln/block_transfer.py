# SPDX-License-Identifier: Apache-2.0
"""Gather and scatter between the blocks of a paged KV cache and token-major chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from lmcache_rbln.kv_layout import KVLayout, PagedKV

#: Host staging of one group of layers, in bytes.
_GROUP_NBYTES = 4 << 20


def gather(
    paged: PagedKV,
    block_ids: Sequence[int],
    chunks: Sequence[torch.Tensor],
    blocks_per_chunk: int,
    skip_blocks: int = 0,
) -> None:
    """Copy blocks of a paged cache into chunks; the request has been checked by ``device_ops``."""
    _wait_for_engine(paged.device)
    for ids, window in _windows(paged, block_ids, chunks, blocks_per_chunk, skip_blocks):
        for first, last in _groups(paged, len(ids)):
            staged = _stage(paged, last - first, len(ids))
            torch._foreach_copy_(_runs(paged, staged), _blocks(paged, first, last, ids))
            window[..., first:last, :, :, :, :].copy_(_token_major(paged, staged))


def scatter(
    paged: PagedKV,
    block_ids: Sequence[int],
    chunks: Sequence[torch.Tensor],
    blocks_per_chunk: int,
    skip_blocks: int = 0,
) -> None:
    """Copy chunks into blocks of a paged cache; the request has been checked by ``device_ops``."""
    _wait_for_engine(paged.device)
    for ids, window in _windows(paged, block_ids, chunks, blocks_per_chunk, skip_blocks):
        for first, last in _groups(paged, len(ids)):
            staged = _stage(paged, last - first, len(ids))
            _token_major(paged, staged).copy_(window[..., first:last, :, :, :, :])
            torch._foreach_copy_(_blocks(paged, first, last, ids), _runs(paged, staged))


def _wait_for_engine(device: torch.device) -> None:
    """Wait for what the engine has queued: copies without a stream may overtake it."""
    torch.rbln.synchronize(device)  # type: ignore[attr-defined]


def _windows(
    paged: PagedKV,
    block_ids: Sequence[int],
    chunks: Sequence[torch.Tensor],
    blocks_per_chunk: int,
    skip_blocks: int,
) -> Iterator[tuple[Sequence[int], torch.Tensor]]:
    """A chunk's block ids, less the skipped, and the chunk's part for them.

    The part is ``[2, num_layers, blocks, block_size, num_heads, head_size]`` (MLA: no first axis).
    """
    for index, chunk in enumerate(chunks):
        start = index * blocks_per_chunk
        end = min(len(block_ids), start + blocks_per_chunk)
        begin = max(start, skip_blocks)
        if begin < end:
            tokens = chunk[
                ..., (begin - start) * paged.block_size : (end - start) * paged.block_size, :
            ]
            yield (
                block_ids[begin:end],
                tokens.unflatten(-1, (paged.num_heads, paged.head_size)).unflatten(
                    -3, (end - begin, paged.block_size)
                ),
            )


def _groups(paged: PagedKV, num_blocks: int) -> Iterator[tuple[int, int]]:
    step = max(1, _GROUP_NBYTES // (num_blocks * paged.block_nbytes))
    for first in range(0, len(paged.layers), step):
        yield first, min(len(paged.layers), first + step)


def _stage(paged: PagedKV, num_layers: int, num_blocks: int) -> torch.Tensor:
    """Host memory for the blocks of a group, ``[layers, blocks, planes, heads, block, head size]``."""
    return torch.empty(
        num_layers,
        num_blocks,
        paged.planes,
        paged.num_heads,
        paged.block_size,
        paged.head_size,
        dtype=paged.dtype,
    )


def _token_major(paged: PagedKV, staged: torch.Tensor) -> torch.Tensor:
    view = staged.permute(2, 0, 1, 4, 3, 5)
    return view[0] if paged.layout is KVLayout.MLA else view


def _runs(paged: PagedKV, staged: torch.Tensor) -> list[torch.Tensor]:
    """Staging of each run, in the order of ``_blocks``."""
    if paged.layout is KVLayout.BLOCKS_FIRST:
        return list(staged.flatten(0, 1).unsqueeze(3).unbind(0))
    if paged.layout is KVLayout.KV_FIRST:
        return list(staged.flatten(0, 2).unsqueeze(2).unbind(0))
    return list(staged.flatten(0, 3).unbind(0))


def _blocks(paged: PagedKV, first: int, last: int, ids: Sequence[int]) -> list[torch.Tensor]:
    """Each contiguous run of the blocks on the device."""
    layers = paged.layers[first:last]
    if paged.layout is KVLayout.KV_FIRST:
        return [layer[plane, block] for layer in layers for block in ids for plane in (0, 1)]
    return [layer[block] for layer in layers for block in ids]
