# SPDX-License-Identifier: Apache-2.0
"""Reusable buffers between a paged cache and its chunks: few, of bounded size, never shared.

A buffer is leased for one step of a transfer, so that however many transfers run at once stay
within these bounds, in whole MiB:

======================================  =======  =============================================
variable                                default  bounds
======================================  =======  =============================================
``LMCACHE_RBLN_STAGING_MB``             24       host memory of the process
``LMCACHE_RBLN_DEVICE_STAGING_MB``      24       memory on each NPU, for each dtype and kind of
                                                 cache (HND, MLA); 0: none is used
======================================  =======  =============================================
"""

from __future__ import annotations

import mmap
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
import numpy.typing as npt
import torch

from lmcache_rbln._log import logger_of

HOST_VARIABLE = "LMCACHE_RBLN_STAGING_MB"
DEVICE_VARIABLE = "LMCACHE_RBLN_DEVICE_STAGING_MB"

_MIB = 1 << 20
_HOST_CAP = 24 * _MIB
_DEVICE_CAP = 24 * _MIB

#: Largest size of one buffer, in bytes. HND: fixed costs are small beside so many, and more gains
#: nothing, and falls out of the cores' caches between the device copy and the transpose. MLA needs
#: no host buffer (docs/performance.md).
HND_BUFFER = 8 * _MIB
MLA_BUFFER = 12 * _MIB

_logger = logger_of("staging")

_PAGE = 4096
_HUGE_PAGE = 2 * _MIB


class Buffer:
    """Memory with one axis, cut into views by each step; the last cut is kept for the next step."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._key: tuple[torch.dtype, tuple[int, ...]] | None = None
        self._views: tuple[torch.Tensor, ...] = ()

    def cut(self, dtype: torch.dtype, lengths: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        """Adjacent views from the start on, of so many elements of ``dtype`` each."""
        if self._key != (dtype, lengths):
            used = self.whole(dtype, sum(lengths))
            self._views = tuple(used.split_with_sizes(list(lengths)))
            self._key = (dtype, lengths)
        return self._views

    def whole(self, dtype: torch.dtype, length: int) -> torch.Tensor:
        """One view from the start on, of so many elements of ``dtype``."""
        return self._memory.view(dtype)[:length]

    def rows(self, row: np.dtype[np.void], count: int) -> npt.NDArray[np.void]:
        """One view from the start on, of so many rows; host memory only."""
        rows: npt.NDArray[np.void] = self._memory.numpy()[: count * row.itemsize].view(row)
        return rows


class Buffers:
    """Up to ``count`` buffers of ``nbytes`` bytes, made when they are first needed.

    Args:
        count: How many at most; 0 for none.
        nbytes: Bytes of each.
        allocate: Makes the memory of one, given its bytes.
    """

    def __init__(self, count: int, nbytes: int, allocate: Callable[[int], torch.Tensor]) -> None:
        self.nbytes = nbytes
        self._count = count
        self._allocate = allocate
        self._made = 0
        self._free: list[Buffer] = []
        self._aside: deque[Buffer] = deque(maxlen=count)
        self._returned = threading.Condition()
        self._last_return = 0.0

    @contextmanager
    def lease(self) -> Iterator[Buffer]:
        """A buffer for the caller alone; waits for one where all are in use.

        Raises:
            RuntimeError: There is no memory for even one.
        """
        buffer = self._take()
        try:
            yield buffer
        except BaseException:
            # A copy that failed may still write: its buffer stays, used by nobody, until no
            # transfer has run for a while. Of many such, the last ones.
            with self._returned:
                self._aside.append(buffer)
                self._made -= 1
                self._returned.notify_all()
            raise
        with self._returned:
            self._free.append(buffer)
            self._last_return = time.monotonic()
            self._returned.notify_all()

    def prepare(self) -> None:
        """Make the first buffer, if there is none.

        Raises:
            RuntimeError: There is no memory for it.
        """
        if not self._made:
            with self.lease():
                pass

    def release_unused(self, idle_s: float) -> bool:
        """Free the buffers if none was used for ``idle_s`` seconds; whether there are none now."""
        with self._returned:
            if time.monotonic() - self._last_return >= idle_s:
                self._made -= len(self._free)
                self._free.clear()
                self._aside.clear()
            return not self._made

    def _take(self) -> Buffer:
        with self._returned:
            while not self._free:
                if self._made < self._count:
                    try:
                        buffer = Buffer(self._allocate(self.nbytes))
                    except (RuntimeError, OSError):
                        if not self._made:
                            self._returned.notify_all()  # nobody else will get one either
                            raise
                        # Make do with those there are.
                    else:
                        self._made += 1
                        return buffer
                self._returned.wait()
            return self._free.pop()


class Staging:
    """The buffers of a process.

    Args:
        host_nbytes: Bound of those on the host.
        device_nbytes: Bound of those on each NPU, for each dtype and size; 0 for none.
    """

    def __init__(self, host_nbytes: int, device_nbytes: int) -> None:
        # A third each: one on the link, one being transposed, one ready to be next.
        nbytes = min(HND_BUFFER, host_nbytes // 3) & -_PAGE
        self.host = Buffers(host_nbytes // nbytes, nbytes, _host_memory)
        self._device_nbytes = device_nbytes
        self._lock = threading.Lock()
        self._on_device: dict[tuple[torch.device, torch.dtype, int], Buffers] = {}
        self._warned: set[torch.device] = set()

    @classmethod
    def from_environment(cls) -> Staging:
        """The buffers of this process, within the bounds that the environment sets.

        Raises:
            ValueError: A bound is no size.
        """
        return cls(
            _bound(HOST_VARIABLE, _HOST_CAP, least=1), _bound(DEVICE_VARIABLE, _DEVICE_CAP, least=0)
        )

    def on_device(self, device: torch.device, dtype: torch.dtype, at_most: int) -> Buffers | None:
        """The buffers on an NPU, or None where the bound or its memory leaves no room for one.

        Args:
            device: The NPU.
            dtype: Of the cache.
            at_most: ``HND_BUFFER`` or ``MLA_BUFFER``.
        """
        # Half each, so that one can be on the link while the other is filled or emptied.
        nbytes = min(at_most, self._device_nbytes // 2) & -_PAGE
        if not nbytes:
            return None
        with self._lock:
            buffers = self._on_device.get((device, dtype, at_most))
            if buffers is None:
                # The NPU may keep a dtype in a form of its own: staging has that of the cache.
                buffers = self._on_device[device, dtype, at_most] = Buffers(
                    self._device_nbytes // nbytes,
                    nbytes,
                    lambda size: torch.empty(size // dtype.itemsize, dtype=dtype, device=device),
                )
        try:
            buffers.prepare()
        except RuntimeError as exc:
            self._warn_once(device, nbytes, exc)
            return None
        return buffers

    def release_unused(self, idle_s: float) -> bool:
        """Free what was not used for ``idle_s`` seconds; whether nothing is left."""
        with self._lock:
            pools = [self.host, *self._on_device.values()]
        left = [pool for pool in pools if not pool.release_unused(idle_s)]
        return not left

    def _warn_once(self, device: torch.device, nbytes: int, reason: RuntimeError) -> None:
        if device not in self._warned:
            self._warned.add(device)
            _logger().warning(
                "%s has no %d bytes to spare: KV transfers do without staging there, which is "
                "slower for small blocks and for MLA (%s)",
                device, nbytes, reason,
            )  # fmt: skip


def _bound(variable: str, default: int, least: int) -> int:
    """A bound in bytes."""
    text = os.environ.get(variable, "").strip()
    if not text:
        return default
    if re.fullmatch("[0-9]{1,6}", text) is None or int(text) < least:
        raise ValueError(
            f"{variable}={text!r} is not a size; expected a whole number of MiB, {least} to 999999, "
            f"or leave it unset for {default // _MIB}"
        )
    return int(text) * _MIB


def _host_memory(nbytes: int) -> torch.Tensor:
    """Host memory, in huge pages where the system gives them.

    The runtime pins the pages of each copy. LMCache measured on an RBLN-CR13 that with pages of
    4 KiB this costs more than the copy itself (32 ms against 10 ms; its RBLN design notes).
    """
    region = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        region.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(region, dtype=np.uint8)
    start = -whole.ctypes.data % _HUGE_PAGE
    aligned = whole[start : start + nbytes]
    aligned[:] = 0  # fault its pages in now, not in a transfer
    return torch.from_numpy(aligned)
