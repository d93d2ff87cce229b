# SPDX-License-Identifier: Apache-2.0
"""``RblnDeviceOps``; import it from ``lmcache_rbln.device_ops``, which orders the imports.

Checks the whole request before the first byte moves, then hands it to ``block_transfer``.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from lmcache import lmcache_native
from lmcache.v1.platform.base.device_ops import DeviceOps

from lmcache_rbln import block_transfer, kv_layout, self_check, telemetry
from lmcache_rbln.kv_layout import KVLayout, PagedKV

#: What LMCache's transfer contexts expect of a device operation (0.5.4-0.5.6): its retrieve catches
#: only these, and anything else skips the release of its read locks.
_EXPECTED_ERRORS = (ValueError, RuntimeError, TypeError, IndexError)

#: Formats under which LMCache passes an RBLN cache on. ``NL_X_NB_TWO_NH_ONE_BS_HS`` is blocks-first
#: in LMCache's own terms, which no release before 0.5.7 has.
_HND_FORMATS = ("NL_X_TWO_NB_NH_ONE_BS_HS", "NL_X_NB_TWO_NH_ONE_BS_HS")
_MLA_FORMATS = ("NL_X_NB_BS_HS",)


class RblnDeviceOps(DeviceOps):  # type: ignore[misc]  # LMCache ships no type information
    """LMCache's operations on RBLN; all but the block transfer are LMCache's torch baseline."""

    device_type: ClassVar[str] = "rbln"

    # LMCache passes tensors, not pointers, where the annotation of lmcache_objects_ptrs says Tensor.
    @telemetry.counted
    def multi_layer_block_kv_transfer(
        self,
        paged_buffer_ptrs_tensor: list[torch.Tensor],
        lmcache_objects_ptrs: list[torch.Tensor],
        block_ids: torch.Tensor | list[int],
        device: torch.device | str,
        direction: lmcache_native.TransferDirection,
        shape_desc: Any,
        lmcache_chunk_size: int,
        engine_kv_format: lmcache_native.EngineKVFormat,
        skip_prefix_n_blocks: int,
    ) -> None:
        """Move whole blocks between a paged KV cache and token-major chunks.

        Block ``i`` of ``block_ids`` is tokens ``[i * block_size, (i + 1) * block_size)`` of the
        chunks laid end to end; the last chunk may be left with fewer blocks than it has room for.

        Args:
            paged_buffer_ptrs_tensor: One tensor a layer, on ``rbln``, in a layout of ``kv_layout``.
            lmcache_objects_ptrs: The chunks, on the host: ``[2, num_layers, num_tokens,
                num_kv_heads * head_size]``, or ``[num_layers, num_tokens, head_size]`` for MLA, of
                the cache's dtype. A view of a larger buffer will do if its tokens are dense.
            block_ids: Blocks in token order, a sequence, tensor or array; on gather they may
                repeat.
            device: Not used: the tensors say where they are.
            direction: ``D2H`` gathers blocks into chunks, ``H2D`` scatters chunks into blocks.
            shape_desc: LMCache's description of the cache; ``bs`` is its block size in tokens.
            lmcache_chunk_size: Tokens a chunk, a multiple of the block size.
            engine_kv_format: LMCache's name of the layout.
            skip_prefix_n_blocks: Blocks at the start, counted across chunks, that are neither read
                nor written.

        Raises:
            ValueError: The request does not fit; nothing was written.
            TypeError: A number, or the list of block ids, is none; nothing was written.
            RuntimeError: The transfer failed; what was written so far is to be thrown away.
        """
        del device
        try:
            paged = _paged(paged_buffer_ptrs_tensor, engine_kv_format)
            blocks_per_chunk = _blocks_per_chunk(paged, shape_desc, lmcache_chunk_size)
            ids = _block_ids(block_ids, paged)
            skip = _skip(skip_prefix_n_blocks)
            chunks = _chunks(lmcache_objects_ptrs, paged, len(ids), blocks_per_chunk)
            gathering = _is_gather(direction)
            if gathering:
                _refuse_shared_memory(chunks)
            else:
                _refuse_repeated(ids[skip:])
            self_check.ensure(paged)
            if gathering:
                block_transfer.gather(paged, ids, chunks, blocks_per_chunk, skip)
            else:
                block_transfer.scatter(paged, ids, chunks, blocks_per_chunk, skip)
        except _EXPECTED_ERRORS:
            raise
        except Exception as exc:
            raise RuntimeError(f"the KV transfer failed: {type(exc).__name__}: {exc}") from exc


def _is_gather(direction: Any) -> bool:
    known = lmcache_native.TransferDirection
    if direction == known.D2H:
        return True
    if direction == known.H2D:
        return False
    raise ValueError(f"unknown transfer direction {direction!r}; expected D2H or H2D")


def _paged(layers: Any, engine_kv_format: Any) -> PagedKV:
    if isinstance(layers, torch.Tensor) or not isinstance(layers, Sequence):
        raise ValueError(
            f"the KV cache is given as {type(layers).__name__}; the RBLN backend takes a list of "
            "tensors, one a layer, not pointers"
        )
    paged = kv_layout.resolve(layers)
    if paged.device.type != "rbln":
        raise ValueError(
            f"the KV cache is {kv_layout.describe(layers[0])}; the RBLN backend moves caches on rbln"
        )
    name = getattr(engine_kv_format, "name", repr(engine_kv_format))
    fitting = _MLA_FORMATS if paged.layout is KVLayout.MLA else _HND_FORMATS
    if name not in fitting:
        raise ValueError(
            f"LMCache calls the KV cache {kv_layout.describe(layers[0])} {name}, expected "
            f"{' or '.join(fitting)}; supported: {kv_layout.SUPPORTED}"
        )
    return paged


def _whole(value: Any, name: str, unit: str) -> int:
    """The value as an ``int``; a float, or a text, is an error of whoever calls."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}, expected a whole number of {unit}") from None


def _blocks_per_chunk(paged: PagedKV, shape_desc: Any, chunk_size: Any) -> int:
    block_size = _whole(getattr(shape_desc, "bs", None), "the block size, shape_desc.bs,", "tokens")
    if block_size != paged.block_size:
        raise ValueError(
            f"the block size is given as {block_size} tokens, but the KV cache "
            f"{kv_layout.describe(paged.layers[0])} has {paged.block_size}"
        )
    tokens = _whole(chunk_size, "lmcache_chunk_size", "tokens")
    if tokens <= 0 or tokens % block_size:
        raise ValueError(
            f"the chunk size is {tokens} tokens, expected a multiple of the block size "
            f"{block_size}; start lmcache server with --chunk-size {max(1, tokens // block_size) * block_size} or another multiple"
        )
    return tokens // block_size


def _block_ids(block_ids: Any, paged: PagedKV) -> list[int]:
    listed = block_ids.tolist() if hasattr(block_ids, "tolist") else block_ids
    # A set has no order, and a dictionary's keys are not meant.
    if isinstance(listed, str | bytes) or not isinstance(listed, Sequence):
        raise TypeError(f"block_ids is {block_ids!r}, expected a list or a tensor of them")
    if any(isinstance(block, bool) for block in listed):
        raise TypeError("block_ids holds booleans, expected block ids; a mask names none")
    try:
        ids = [operator.index(block) for block in listed]
    except TypeError as exc:
        raise TypeError(f"block_ids holds something else than whole numbers: {exc}") from None
    if ids and not (min(ids) >= 0 and max(ids) < paged.num_blocks):
        wrong = next(block for block in ids if not 0 <= block < paged.num_blocks)
        raise ValueError(
            f"block id {wrong} is out of range: the KV cache has blocks 0 to {paged.num_blocks - 1}"
        )
    return ids


def _skip(skip_prefix_n_blocks: Any) -> int:
    skip = _whole(skip_prefix_n_blocks, "skip_prefix_n_blocks", "blocks")
    if skip < 0:
        raise ValueError(f"skip_prefix_n_blocks is {skip}, expected 0 or more blocks")
    return skip


def _refuse_repeated(written: list[int]) -> None:
    if len(set(written)) != len(written):
        seen: set[int] = set()
        twice = next(block for block in written if block in seen or seen.add(block))  # type: ignore[func-returns-value]
        raise ValueError(
            f"block id {twice} is to be written twice by one scatter; each block may be the "
            "destination of one part of a chunk only"
        )


def _refuse_shared_memory(chunks: list[torch.Tensor]) -> None:
    """Refuse chunks that overlap: one would be written over the other, by whichever comes last."""
    extents = sorted(
        (chunk.data_ptr(), chunk.data_ptr() + _extent_nbytes(chunk)) for chunk in chunks
    )
    if all(end <= start for (_, end), (start, _) in itertools.pairwise(extents)):
        return
    # What a chunk has of one layer and plane is one run; chunks may lie between each other's runs.
    starts, ends = [], []
    for chunk in chunks:
        itemsize, outer = chunk.element_size(), chunk.ndim - 2
        first = np.array(chunk.data_ptr())
        for size, stride in zip(chunk.shape[:outer], chunk.stride()[:outer], strict=True):
            first = np.add.outer(first, np.arange(size) * stride * itemsize)
        starts.append(first.ravel())
        ends.append(starts[-1] + math.prod(chunk.shape[outer:]) * itemsize)
    order = np.argsort(all_starts := np.concatenate(starts))
    if (all_starts[order][1:] < np.concatenate(ends)[order][:-1]).any():
        raise ValueError(
            "chunks overlap in memory, and one gather would write both; each chunk needs its own"
        )


def _extent_nbytes(chunk: torch.Tensor) -> int:
    """Bytes from the first element of a chunk to the last."""
    if chunk.is_contiguous():
        return chunk.nbytes
    last = sum((size - 1) * step for size, step in zip(chunk.shape, chunk.stride(), strict=True))
    return (last + 1) * chunk.element_size()


def _chunks(chunks: Any, paged: PagedKV, num_ids: int, blocks_per_chunk: int) -> list[torch.Tensor]:
    """Check that each chunk fits the cache and holds the blocks that fall to it."""
    if isinstance(chunks, torch.Tensor) or not isinstance(chunks, Sequence):
        raise ValueError(
            f"the chunks are given as {type(chunks).__name__}, expected a list of tensors"
        )
    if not len(chunks) * blocks_per_chunk >= num_ids > (len(chunks) - 1) * blocks_per_chunk and (
        chunks or num_ids
    ):
        raise ValueError(
            f"{num_ids} block ids do not fit {len(chunks)} chunks of {blocks_per_chunk} blocks: "
            "each chunk but the last takes all its blocks, and the last at least one"
        )
    for index, chunk in enumerate(chunks):
        if not isinstance(chunk, torch.Tensor):
            raise ValueError(
                f"chunk {index} is given as {type(chunk).__name__}; the RBLN backend takes tensors, "
                "not pointers"
            )
        blocks = min(blocks_per_chunk, num_ids - index * blocks_per_chunk)
        _refuse_unfitting(index, chunk, paged, blocks * paged.block_size)
    return list(chunks)


def _refuse_unfitting(index: int, chunk: torch.Tensor, paged: PagedKV, tokens: int) -> None:
    expected = paged.chunk_shape(tokens)
    fits = (
        chunk.ndim == len(expected)
        and chunk.dtype == paged.dtype
        and chunk.device.type == "cpu"
        and chunk.shape[:-2] == expected[:-2]
        and chunk.shape[-2] >= tokens
        and chunk.shape[-1] == expected[-1]
    )
    if not fits:
        dtype = str(paged.dtype).removeprefix("torch.")
        raise ValueError(
            f"chunk {index} is {kv_layout.describe(chunk)}, expected {list(expected)} {dtype} on "
            f"cpu, or more tokens than {tokens}, for the KV cache "
            f"{kv_layout.describe(paged.layers[0])}: was it stored by another model or "
            "tensor-parallel size?"
        )
    if not _tokens_are_dense(chunk):
        raise ValueError(
            f"chunk {index} is {kv_layout.describe(chunk)}: the tokens of one layer must lie side "
            "by side, and layers may not overlap"
        )


def _tokens_are_dense(chunk: torch.Tensor) -> bool:
    *outer, tokens, width = chunk.shape
    *outer_strides, token_stride, element_stride = chunk.stride()
    if (width > 1 and element_stride != 1) or (tokens > 1 and token_stride != width):
        return False
    extent = tokens * width
    for stride, size in sorted(zip(outer_strides, outer, strict=True)):
        if size > 1:
            if stride < extent:
                return False
            extent = stride * size
    return True
