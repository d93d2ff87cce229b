# SPDX-License-Identifier: Apache-2.0
"""Gather and scatter between the blocks of a paged KV cache and token-major chunks.

A transfer is cut into steps of a few layers. A step crosses the link by way of a small staging
buffer, in as few submissions as can be, and is transposed on the host while the link works on
another step: the whole takes little more than the longer of the two.

====  ========================================================================
HND   blocks - collected on the NPU, if small - host staging - transpose - chunk
MLA   blocks - collected on the NPU, if several - chunk
====  ========================================================================

Gather goes through this from left to right, scatter from right to left.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from lmcache_rbln.helper_threads import HelperThreads
from lmcache_rbln.kv_layout import KVLayout, PagedKV
from lmcache_rbln.staging import HND_BUFFER, MLA_BUFFER, Buffer, Buffers, Staging
from lmcache_rbln.transfer_plan import Step, plan

#: Threads that help the transfers of the process; the calling threads work as well. Most of the
#: time they wait for the link: with three, one is there when it is free (docs/performance.md).
_HELPERS = 2

#: Seconds after which threads and staging that nobody used are given back.
_IDLE_S = 10.0

#: Mean length, in bytes, below which runs are collected on the NPU to cross the link together: in
#: a bulk host copy each costs a sixteenth of a submission, and more, besides its bytes.
_COLLECT_BELOW = 256 << 10

#: Entries of one bulk copy that torch-rbln 0.12.0 sends at most, to or from the host and within
#: the NPU. The vendor measured that 24 entries of 12 MiB together pass the kernel driver, and 32 of
#: 16 MiB do not; bytes are bounded by the staging buffers, 12 MiB at most.
_HOST_BULK = 16
_DEVICE_BULK = 1024

#: Bytes of a step of MLA that goes without staging: what a bulk host copy may have.
_MLA_STEP = 8 << 20

_Rows: TypeAlias = npt.NDArray[np.void]
_Views: TypeAlias = list[torch.Tensor] | tuple[torch.Tensor, ...]


def gather(
    paged: PagedKV,
    block_ids: Sequence[int],
    chunks: Sequence[torch.Tensor],
    blocks_per_chunk: int,
    skip_blocks: int = 0,
) -> None:
    """Copy blocks of a paged cache into chunks; the request has been checked by ``device_ops``.

    Args:
        paged: The cache.
        block_ids: Blocks in token order, in range; they may repeat.
        chunks: Host tensors ``[2, num_layers, tokens, num_heads * head_size]`` (MLA: no first
            axis) of the cache's dtype, tokens dense; the last may have room for more blocks.
        blocks_per_chunk: Blocks that fall to each chunk but the last.
        skip_blocks: Blocks at the start, counted across chunks, that are left alone.

    Raises:
        ValueError: A staging setting is no size, or too small for one token; nothing was written.
        RuntimeError: A copy failed. Nothing works on the chunks any more.
    """
    _transfer(paged, block_ids, chunks, blocks_per_chunk, skip_blocks, gathering=True)


def scatter(
    paged: PagedKV,
    block_ids: Sequence[int],
    chunks: Sequence[torch.Tensor],
    blocks_per_chunk: int,
    skip_blocks: int = 0,
) -> None:
    """Copy chunks into blocks of a paged cache; the request has been checked by ``device_ops``.

    Arguments and errors are those of ``gather``, but that no block may come twice.
    """
    _transfer(paged, block_ids, chunks, blocks_per_chunk, skip_blocks, gathering=False)


def is_running() -> bool:
    """Whether any transfer of this process runs at this moment."""
    shared = _current
    return shared is not None and bool(shared.running)


def _transfer(
    paged: PagedKV,
    block_ids: Sequence[int],
    chunks: Sequence[torch.Tensor],
    blocks_per_chunk: int,
    skip_blocks: int,
    gathering: bool,
) -> None:
    shared = _shared()
    # Views cost less in inference mode, and an inference tensor can be written in it only: all of
    # a transfer runs in it, on every thread, whatever the caller's mode.
    with torch.inference_mode():
        mla = paged.layout is KVLayout.MLA
        on_device = shared.staging.on_device(
            paged.device, paged.dtype, MLA_BUFFER if mla else HND_BUFFER
        )
        route: _Route
        if mla:
            route = _MlaRoute(paged, chunks, on_device)
        else:
            route = _HndRoute(paged, chunks, on_device, shared.staging.host)
        steps = plan(
            paged,
            block_ids,
            len(chunks),
            blocks_per_chunk,
            skip_blocks,
            route.step_nbytes,
            gathering,
        )
        if steps:
            _wait_for_engine(paged.device)
            move = route.gather if gathering else route.scatter
            this_thread = threading.get_ident()
            shared.running.add(this_thread)
            try:
                _share_out(steps, move, paged.device, shared.helpers)
            finally:
                shared.running.discard(this_thread)


class _Route(ABC):
    """How a step gets from blocks to chunks, and back.

    Args:
        paged: The cache.
        chunks: All chunks of the transfer.
        on_device: Staging on the NPU, or None.
    """

    #: Bytes that one step may have.
    step_nbytes: int

    def __init__(
        self, paged: PagedKV, chunks: Sequence[torch.Tensor], on_device: Buffers | None
    ) -> None:
        self._dtype = paged.dtype
        self._layers = paged.layers
        self._chunks = chunks
        self._on_device = on_device

    @abstractmethod
    def gather(self, step: Step) -> None:
        """Move a step from the cache into its chunk."""

    @abstractmethod
    def scatter(self, step: Step) -> None:
        """Move a step from its chunk into the cache."""

    def _blocks(self, step: Step) -> list[torch.Tensor]:
        """The step's runs in the cache, in staging order, one axis each."""
        layers = self._layers[step.layers.start : step.layers.stop]
        if step.part.cut is None:
            return [
                layer.as_strided((length,), (1,), layer.storage_offset() + start)
                for layer in layers
                for start, length in step.part.runs
            ]
        start, lengths, which = step.part.cut
        whole = (sum(lengths),)
        blocks: list[torch.Tensor] = []
        for layer in layers:
            stretch = layer.as_strided(whole, (1,), layer.storage_offset() + start)
            pieces = stretch.split_with_sizes(lengths)
            blocks += [pieces[index] for index in which]
        return blocks


class _HndRoute(_Route):
    def __init__(
        self,
        paged: PagedKV,
        chunks: Sequence[torch.Tensor],
        on_device: Buffers | None,
        on_host: Buffers,
    ) -> None:
        super().__init__(paged, chunks, on_device)
        self._num_heads = paged.num_heads
        self._row = np.dtype((np.void, paged.head_size * paged.dtype.itemsize))
        self._head_size = paged.head_size
        self._chunk_rows: dict[int, _Rows] = {}
        self._on_host = on_host
        self.step_nbytes = min(on_host.nbytes, on_device.nbytes if on_device else on_host.nbytes)

    def gather(self, step: Step) -> None:
        with self._on_host.lease() as staged:
            collector = self._collector(step)
            if collector is None:
                _copy(staged.cut(self._dtype, step.lengths), self._blocks(step), _HOST_BULK)
            else:
                with collector.lease() as collected:
                    _copy(
                        collected.cut(self._dtype, step.lengths), self._blocks(step), _DEVICE_BULK
                    )
                    staged.whole(self._dtype, step.num_elements).copy_(
                        collected.whole(self._dtype, step.num_elements)
                    )
            for rows, order, chunk_rows in self._transposes(step, staged):
                # "clip" lets numpy write to `out` directly; no index is out of range.
                rows.take(order, out=chunk_rows, mode="clip")

    def scatter(self, step: Step) -> None:
        with self._on_host.lease() as staged:
            for rows, order, chunk_rows in self._transposes(step, staged):
                rows.put(order, chunk_rows, mode="clip")
            collector = self._collector(step)
            if collector is None:
                _copy(self._blocks(step), staged.cut(self._dtype, step.lengths), _HOST_BULK)
            else:
                with collector.lease() as collected:
                    collected.whole(self._dtype, step.num_elements).copy_(
                        staged.whole(self._dtype, step.num_elements)
                    )
                    _copy(
                        self._blocks(step), collected.cut(self._dtype, step.lengths), _DEVICE_BULK
                    )

    def _collector(self, step: Step) -> Buffers | None:
        """Staging on the NPU, for a step of many small runs."""
        nbytes = step.num_elements * self._dtype.itemsize
        many_small = len(step.lengths) > _HOST_BULK and nbytes < _COLLECT_BELOW * len(step.lengths)
        return self._on_device if many_small else None

    def _transposes(
        self, step: Step, staged: Buffer
    ) -> Iterator[tuple[_Rows, npt.NDArray[np.intp], _Rows]]:
        """Rows in staging, which of them to take in turn, and the rows of the chunk they become.

        Of one plane of as many layers as adjoin in the chunk, or of one.
        """
        part, layers = step.part, step.layers
        layer_rows = part.num_tokens * self._num_heads * len(part.planes)
        rows = staged.rows(self._row, layer_rows * len(layers))
        first = part.first_token * self._num_heads
        all_rows = self._chunk_rows.get(part.chunk)
        if all_rows is None:
            all_rows = _rows(self._chunks[part.chunk], self._head_size, self._row)
            self._chunk_rows[part.chunk] = all_rows
        chunk = all_rows[
            part.planes.start : part.planes.stop,
            layers.start : layers.stop,
            first : first + part.num_tokens * self._num_heads,
        ]
        together = len(layers) if chunk[0].flags.c_contiguous else 1
        order = _order(
            together,
            layer_rows,
            part.num_tokens,
            part.block_tokens,
            part.block_stride,
            self._num_heads,
        )
        for layer in range(0, len(layers), together):
            for plane in range(len(part.planes)):
                start = layer * layer_rows + plane * part.plane_stride
                chunk_rows = chunk[plane, layer : layer + together].reshape(-1)
                yield rows[start:], order, chunk_rows


class _MlaRoute(_Route):
    def __init__(
        self, paged: PagedKV, chunks: Sequence[torch.Tensor], on_device: Buffers | None
    ) -> None:
        super().__init__(paged, chunks, on_device)
        self._width = paged.token_width
        self.step_nbytes = on_device.nbytes if on_device else _MLA_STEP

    def gather(self, step: Step) -> None:
        windows = self._windows(step)
        if self._on_device is None or len(step.lengths) == 1:
            _copy(_split(windows, step.lengths), self._blocks(step), _HOST_BULK)
            return
        with self._on_device.lease() as collected:
            _copy(collected.cut(self._dtype, step.lengths), self._blocks(step), _DEVICE_BULK)
            crossing = collected.whole(self._dtype, step.num_elements)
            _copy(windows, _split([crossing], _lengths(windows)), _HOST_BULK)

    def scatter(self, step: Step) -> None:
        windows = self._windows(step)
        if self._on_device is None or len(step.lengths) == 1:
            _copy(self._blocks(step), _split(windows, step.lengths), _HOST_BULK)
            return
        with self._on_device.lease() as collected:
            crossing = collected.whole(self._dtype, step.num_elements)
            _copy(_split([crossing], _lengths(windows)), windows, _HOST_BULK)
            _copy(self._blocks(step), collected.cut(self._dtype, step.lengths), _DEVICE_BULK)

    def _windows(self, step: Step) -> list[torch.Tensor]:
        """The step's tokens in its chunk: one view where its layers adjoin, else one a layer."""
        chunk = self._chunks[step.part.chunk]
        per_layer = step.part.num_tokens * self._width
        stride = chunk.stride(0)
        first = chunk.storage_offset() + step.part.first_token * self._width
        if stride == per_layer:
            start = first + step.layers.start * stride
            return [chunk.as_strided((step.num_elements,), (1,), start)]
        return [
            chunk.as_strided((per_layer,), (1,), first + layer * stride) for layer in step.layers
        ]


def _rows(chunk: torch.Tensor, head_size: int, row: np.dtype[np.void]) -> _Rows:
    """A chunk as ``[2, num_layers, tokens * num_heads]`` rows of one head of one token each."""
    planes, layers, tokens, width = chunk.shape
    outer = chunk.stride()[:2]
    heads = chunk.as_strided(
        (planes, layers, tokens * width // head_size, head_size), (*outer, head_size, 1)
    )
    rows: _Rows = heads.view(torch.uint8).numpy().view(row)[..., 0]
    return rows


@functools.lru_cache(maxsize=8)
def _order(
    num_layers: int,
    layer_rows: int,
    num_tokens: int,
    block_tokens: int,
    block_stride: int,
    num_heads: int,
) -> npt.NDArray[np.intp]:
    """Where in staging the rows of one plane of a chunk are: by layer, token, head."""
    layers = np.arange(num_layers) * layer_rows
    blocks, tokens = np.divmod(np.arange(num_tokens), block_tokens)
    heads = np.arange(num_heads) * block_tokens
    in_plane = (blocks * block_stride + tokens)[:, None] + heads
    order: npt.NDArray[np.intp] = np.ravel(layers[:, None, None] + in_plane).astype(np.intp)
    order.flags.writeable = False
    return order


def _lengths(views: _Views) -> tuple[int, ...]:
    return tuple(view.numel() for view in views)


def _split(views: _Views, lengths: tuple[int, ...]) -> _Views:
    """Views of equal size, cut further into so many elements each, all together."""
    if len(views) == len(lengths):
        return views
    each = lengths[: len(lengths) // len(views)]
    return [piece for view in views for piece in view.split_with_sizes(list(each))]


def _copy(to: _Views, source: _Views, at_once: int) -> None:
    """Copy each to each, in bulk calls of at most so many."""
    if len(to) == 1:
        to[0].copy_(source[0])
        return
    for start in range(0, len(to), at_once):
        torch._foreach_copy_(to[start : start + at_once], source[start : start + at_once])


def _wait_for_engine(device: torch.device) -> None:
    """Wait until the NPU has done what was queued before this transfer.

    A stream that is not the default one was made to wait for the cache's event by the caller, as
    LMCache's asynchronous stores do: waiting for that stream is enough, and does not wait for what
    the engine has queued since. Otherwise, or where the caller's stream belongs to another NPU than
    the cache, nothing says what the cache depends on: all of its NPU's streams are waited for.
    """
    rbln = torch.rbln  # type: ignore[attr-defined]
    # Asks for the stream of no other NPU: that would open it, and others may want it.
    if rbln.current_device() == device.index:
        stream = rbln.current_stream(device)
        if stream != rbln.default_stream(device):
            stream.synchronize()
            return
    rbln.synchronize(device)


def _share_out(
    steps: Sequence[Step],
    move: Callable[[Step], None],
    device: torch.device,
    helpers: HelperThreads,
) -> None:
    """Move all steps, on this thread and the helpers; returns or raises when all of them stopped."""
    rbln = torch.rbln  # type: ignore[attr-defined]
    remaining = iter(steps)
    stopped = threading.Event()

    def work() -> None:
        try:
            for step in remaining:
                if stopped.is_set():
                    return
                move(step)
        except BaseException:
            stopped.set()
            raise

    stream = rbln.current_stream(device)

    def help_out() -> None:
        rbln.set_stream(stream)
        with torch.inference_mode():
            work()

    invitations = helpers.ask(help_out, len(steps) - 1)
    errors: list[BaseException] = []
    try:
        work()
    finally:
        # All of them, whatever the first one says: nobody may touch the chunks any more.
        for invitation in invitations:
            if not invitation.cancel():
                errors += _outcome(invitation)
    for error in errors:
        raise error


def _outcome(invitation: Future[None]) -> list[BaseException]:
    """Wait for a helper; its error, and what interrupted the wait, such as a second Ctrl-C."""
    interrupts: list[BaseException] = []
    while True:
        try:
            error = invitation.exception()
        except BaseException as exc:
            interrupts.append(exc)
        else:
            return interrupts if error is None else [*interrupts, error]


class _Shared:
    """What the transfers of a process share."""

    def __init__(self, staging: Staging) -> None:
        self.staging = staging
        #: Threads that called for a transfer now.
        self.running: set[int] = set()
        self.helpers = HelperThreads(_HELPERS, _IDLE_S, may_end=self._release_unused)

    def _release_unused(self) -> bool:
        released = self.staging.release_unused(_IDLE_S)
        if released:
            _order.cache_clear()
        return released

    def close(self) -> None:
        """End the threads and free what no transfer uses."""
        self.helpers.close()
        self.staging.release_unused(0)


_lock = threading.Lock()
_current: _Shared | None = None

#: What a forked process inherited; never freed, since device memory in it belongs to the parent.
_inherited: list[_Shared] = []


def _shared() -> _Shared:
    global _current
    with _lock:
        if _current is None:
            _current = _Shared(Staging.from_environment())
        # Threads that can notice that nobody uses the staging any more.
        _current.helpers.start()
        return _current


def _forget_after_fork() -> None:
    global _lock, _current
    _lock = threading.Lock()
    if _current is not None:
        _inherited.append(_current)
        _current = None


def _close_at_exit() -> None:
    if _current is not None:
        _current.close()


os.register_at_fork(after_in_child=_forget_after_fork)
atexit.register(_close_at_exit)
