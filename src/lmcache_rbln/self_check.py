# SPDX-License-Identifier: Apache-2.0
"""Before a geometry is used for the first time: does this runtime really move its blocks right?

Scratch blocks of known content go through ``block_transfer`` in both directions, and every byte is
compared. A runtime or compiler that permutes a copy would otherwise show as fluent, wrong text;
such permutations have been reported for this device in public. Once: some 25 ms and 7 MiB on the
NPU for blocks of 1024 tokens, in proportion for larger ones, 2 ms for blocks of 16.
"""

from __future__ import annotations

import dataclasses
import math
import os
import threading

import numpy as np
import numpy.typing as npt
import torch

from lmcache_rbln import block_transfer
from lmcache_rbln._log import logger_of
from lmcache_rbln._switch import is_on
from lmcache_rbln.kv_layout import KVLayout, PagedKV

_logger = logger_of("self_check")

#: ``LMCACHE_RBLN_SELF_CHECK=0`` turns the check off.
VARIABLE = "LMCACHE_RBLN_SELF_CHECK"

#: Of the scratch cache. Two heads and layers show an exchange of either; of three blocks one is
#: between those that are moved and must not change.
_LAYERS, _BLOCKS, _MAX_HEADS = 2, 3, 2
_MOVED = (2, 0)

_Bytes = npt.NDArray[np.uint8]

# What was found for each geometry: "" if all is well.
_verdicts: dict[object, str] = {}
_lock = threading.Lock()
_unchecked: set[object] = set()


def _forget_after_fork() -> None:
    # Another thread of the parent may have held it.
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_after_fork)


def ensure(paged: PagedKV) -> None:
    """Check the geometry of a cache, if it is the first time in this process.

    The geometry is layout, dtype, heads, head size, block size and device; the number of heads
    counts up to two only.

    Raises:
        RuntimeError: Blocks of this geometry do not arrive as they were sent, now or when they were
            checked before; or a copy failed, and the next transfer checks again.
    """
    heads = min(paged.num_heads, _MAX_HEADS)
    geometry = (
        paged.layout,
        paged.dtype,
        heads,
        paged.head_size,
        paged.block_size,
        paged.device,
    )
    verdict = _verdicts.get(geometry)
    if verdict is None:
        with _lock:
            verdict = _verdicts.get(geometry)
            if verdict is None:
                if not is_on(VARIABLE):
                    verdict = ""
                else:
                    scratch = _scratch(paged, heads)
                    if scratch is None:
                        return
                    verdict = _compare(scratch)
                    if verdict:
                        _logger().error("%s", verdict)
                _verdicts[geometry] = verdict
    if verdict:
        raise RuntimeError(verdict)


def _scratch(paged: PagedKV, heads: int) -> PagedKV | None:
    """A small cache like the given one, its content undefined; None if the NPU has no room."""
    inner = (paged.block_size, paged.head_size)
    if paged.layout is KVLayout.MLA:
        shape: tuple[int, ...] = (_BLOCKS, *inner)
    elif paged.layout is KVLayout.BLOCKS_FIRST:
        shape = (_BLOCKS, 2, heads, 1, *inner)
    else:
        shape = (2, _BLOCKS, heads, 1, *inner)
    try:
        layers = tuple(
            torch.empty(shape, dtype=paged.dtype, device=paged.device) for _ in range(_LAYERS)
        )
    except RuntimeError as exc:
        key = (paged.layout, paged.dtype, inner, paged.device)
        if key not in _unchecked:
            _unchecked.add(key)
            _logger().warning(
                "Not checked whether KV blocks arrive as they were sent: no room on %s for scratch "
                "blocks of %.1f MiB together (%s). Leave the NPU so much, or set %s=0.",
                paged.device,
                _LAYERS * math.prod(shape) * paged.dtype.itemsize / 2**20,
                exc,
                VARIABLE,
            )
        return None
    return dataclasses.replace(paged, layers=layers, num_blocks=_BLOCKS, num_heads=heads)


def _compare(scratch: PagedKV) -> str:
    """Move the scratch blocks out and back, and say what is wrong with them."""
    itemsize = scratch.dtype.itemsize
    # [layer, block, plane, head, token, byte], by which every layout is a transpose.
    logical = _content(
        _LAYERS,
        _BLOCKS,
        scratch.planes,
        scratch.num_heads,
        scratch.block_size,
        scratch.head_size * itemsize,
    )
    tokens = len(_MOVED) * scratch.block_size
    expected_chunk = np.ascontiguousarray(
        logical[:, list(_MOVED)].transpose(2, 0, 1, 4, 3, 5)
    ).reshape(scratch.planes, _LAYERS, tokens, -1)
    _write(scratch, logical)
    chunk = torch.zeros(scratch.chunk_shape(tokens), dtype=scratch.dtype)
    block_transfer.gather(scratch, _MOVED, [chunk], len(_MOVED))
    gathered = _bytes_of(chunk).reshape(expected_chunk.shape)
    if not np.array_equal(gathered, expected_chunk):
        return _verdict(scratch, "from the NPU to the host", gathered, expected_chunk)

    expected = np.zeros_like(logical)
    _write(scratch, expected)
    block_transfer.scatter(scratch, _MOVED, [chunk], len(_MOVED))
    expected[:, list(_MOVED)] = logical[:, list(_MOVED)]
    expected = _physical(scratch, expected)
    scattered = np.concatenate([_bytes_of(layer.cpu()) for layer in scratch.layers])
    scattered = scattered.reshape(expected.shape)
    if not np.array_equal(scattered, expected):
        return _verdict(scratch, "from the host to the NPU", scattered, expected)
    return ""


def _verdict(scratch: PagedKV, way: str, found: _Bytes, expected: _Bytes) -> str:
    wrong = int(np.count_nonzero(found != expected))
    return (
        f"this NPU's runtime does not move KV blocks right: {wrong} of {expected.size} bytes were "
        f"wrong {way} ({scratch.layout.value}, {str(scratch.dtype).removeprefix('torch.')}, block "
        f"size {scratch.block_size}, head size {scratch.head_size}, {scratch.device}). The RBLN "
        "backend is refused, for a cache would return wrong KV. Report this with the versions of "
        f"driver, runtime and torch-rbln; {VARIABLE}=0 turns the check off, not the fault"
    )


def _content(*shape: int) -> _Bytes:
    """Bytes that tell one coordinate from another: a multiplicative hash of the position."""
    count = int(np.prod(shape))
    words: npt.NDArray[np.uint32] = np.arange(-(-count // 4), dtype=np.uint32)
    with np.errstate(over="ignore"):
        words = (words + np.uint32(1)) * np.uint32(0x9E3779B1)
        words ^= words >> np.uint32(15)
        words *= np.uint32(0x85EBCA77)
    return words.view(np.uint8)[:count].reshape(shape)


def _physical(scratch: PagedKV, logical: _Bytes) -> _Bytes:
    """The bytes in the cache's own order, one layer after another."""
    if scratch.layout is KVLayout.KV_FIRST:
        logical = logical.transpose(0, 2, 1, 3, 4, 5)
    return np.ascontiguousarray(logical)


def _write(scratch: PagedKV, logical: _Bytes) -> None:
    for layer, content in zip(scratch.layers, _physical(scratch, logical), strict=True):
        host = torch.from_numpy(content.reshape(-1)).view(scratch.dtype)
        layer.copy_(host.view(layer.shape))


def _bytes_of(tensor: torch.Tensor) -> _Bytes:
    found: _Bytes = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return found
