# SPDX-License-Identifier: Apache-2.0
"""LMCache's shared-memory pool, made ready before the first store needs it.

The kernel gives a pool its memory page by page, as each 4 KiB are first written: on the path of a
store that is most of its time. LMCache passes the pool to ``pin_memory`` when a server makes it
and when a worker registers. It is registered with the RBLN runtime where torch-rbln can; else its
pages are faulted in ahead of the stores by a thread in the background, and locked where allowed.

``LMCACHE_RBLN_PREFAULT=0`` leaves the pages alone.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import os
import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias

from lmcache.logging import init_logger
from lmcache.v1.platform.base.pin_memory import PinMemoryBackend

from lmcache_rbln import block_transfer
from lmcache_rbln._switch import is_on
from lmcache_rbln.host_memory import MADV_POPULATE_WRITE, may_lock

PREFAULT_VARIABLE = "LMCACHE_RBLN_PREFAULT"

#: Bytes at a time: a few milliseconds' work, after which the thread looks at what goes on.
_STEP = 4 << 20

#: The thread waits for running transfers, but no longer than this for one step.
_PATIENCE_S = 0.1

#: Memory, in bytes, that must stay available on the host.
_RESERVE = 2 << 30

_libc = ctypes.CDLL(None, use_errno=True)

#: Device, inode, and file offset less address: what stays as long as a mapping does.
_File: TypeAlias = tuple[str, str, int]

logger = init_logger("lmcache_rbln.pin_memory")


class RblnPinMemoryBackend(PinMemoryBackend):  # type: ignore[misc]  # LMCache ships no types
    """What LMCache asks to pin and unpin host memory.

    ``is_pin_supported`` stays False: LMCache's server takes it as leave to allocate its pool piece
    by piece and pin each, and a server must not open an NPU.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._prefaults: dict[int, Prefault] = {}
        self._registered: set[int] = set()
        atexit.register(self._stop_all)

    def pin_memory(self, ptr: int, size: int, flags: int = 0) -> bool:
        """Make host memory ready for transfers.

        Args:
            ptr: Its address.
            size: Its bytes.
            flags: Not used.

        Returns:
            Whether the RBLN runtime registered it. Where it did not, LMCache warns that copies will
            be synchronous, as they are meant to be; the rest is done in the background.
        """
        del flags
        why_not = _register(ptr, size)
        if not why_not:
            with self._lock:
                self._registered.add(ptr)
            logger.info("%s of host memory: registered with the RBLN runtime", _gib(size))
            return True
        logger.info(
            "%s of shared memory: %s. Not registered with the RBLN runtime (%s): a warning of "
            "LMCache's about pin_memory and synchronous copies is expected",
            _gib(size), self._start_prefault(ptr, size), why_not,
        )  # fmt: skip
        return False

    def unpin_memory(self, ptr: int) -> bool:
        """Undo ``pin_memory``.

        Args:
            ptr: The address it was given.

        Returns:
            Whether there was anything to undo.
        """
        with self._lock:
            prefault = self._prefaults.pop(ptr, None)
            registered = ptr in self._registered
            self._registered.discard(ptr)
        if prefault is not None:
            prefault.undo()
        if registered:
            import torch

            torch.rbln.unregister_host_memory(ptr)  # type: ignore[attr-defined]
        return registered or prefault is not None

    def wait(self, timeout: float) -> bool:
        """Wait until what runs in the background has ended; whether there was anything, and it has.

        Args:
            timeout: Seconds to wait at most for each pool.
        """
        with self._lock:
            prefaults = list(self._prefaults.values())
        return bool(prefaults) and all(prefault.wait(timeout) for prefault in prefaults)

    def _start_prefault(self, ptr: int, size: int) -> str:
        """Start faulting in; says what is done, or why nothing is."""
        if not is_on(PREFAULT_VARIABLE):
            return f"its pages are left alone ({PREFAULT_VARIABLE}=0)"
        file = _mapped_file(ptr, size)
        if file is None:
            return "its pages are left alone (it is not one mapping of one file)"
        lock, why_not = may_lock(size)
        with self._lock:
            # LMCache unpins only what was pinned: pools that went away are known by themselves.
            self._prefaults = {at: one for at, one in self._prefaults.items() if one.is_there()}
            self._prefaults[ptr] = Prefault(ptr, size, file, lock)
        return "its pages are faulted in, in the background, " + (
            "and locked" if lock else f"but not locked ({why_not})"
        )

    def _stop_all(self) -> None:
        with self._lock:
            prefaults = list(self._prefaults.values())
        for prefault in prefaults:
            prefault.stop()


class Prefault:
    """Faults in, and locks, the pages of a file mapping; on a thread of its own.

    LMCache says nothing when it unmaps a pool that was not registered. So before each step the
    thread looks whether the mapping is still the one that it was started for.

    Args:
        ptr: Address of the mapping, page-aligned.
        size: Bytes, of which nothing beyond is touched.
        file: What ``_mapped_file`` says of it.
        lock: Whether to lock the pages as well.
    """

    def __init__(self, ptr: int, size: int, file: _File, lock: bool) -> None:
        self._ptr = ptr
        self._size = size
        self._file = file
        self._lock = lock
        self._locked = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lmcache-rbln-prefault", daemon=True)
        self._thread.start()

    def is_there(self) -> bool:
        """Whether the mapping is still the same."""
        return _mapped_file(self._ptr, self._size) == self._file

    def stop(self) -> None:
        """End the thread; what it did stays."""
        self._stopping.set()
        self._thread.join()

    def undo(self) -> None:
        """End the thread and unlock what it locked; pages that were faulted in stay."""
        self.stop()
        if self._locked and self.is_there():
            _libc.munlock(ctypes.c_void_p(self._ptr), ctypes.c_size_t(self._locked))

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all is done, or given up; whether it is."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            # Of this thread alone: the engine's threads come first.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        start = time.monotonic()
        for done in range(0, self._size, _STEP):
            self._let_transfers_pass()
            if self._stopping.is_set() or not self.is_there():
                return
            problem = self._fault_in(self._ptr + done, min(_STEP, self._size - done))
            if problem:
                logger.warning(
                    "faulting in the shared memory ended after %s of %s: %s. Stores are slower "
                    "where it has not been written yet",
                    _gib(done), _gib(self._size), problem,
                )  # fmt: skip
                return
        seconds = time.monotonic() - start
        logger.debug("%s of shared memory faulted in, in %.1f s", _gib(self._size), seconds)

    def _let_transfers_pass(self) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while block_transfer.is_running() and time.monotonic() < deadline:
            if self._stopping.wait(0.001):
                return

    def _fault_in(self, address: int, size: int) -> str:
        """One step; "" or why it cannot be done."""
        available = _available_memory()
        if available < size + _RESERVE:
            return f"the host has {_gib(available)} of memory left"
        where = ctypes.c_void_p(address), ctypes.c_size_t(size)
        if _libc.madvise(*where, MADV_POPULATE_WRITE):
            code = ctypes.get_errno()
            if code == errno.EINVAL:
                return "this kernel has no MADV_POPULATE_WRITE (Linux 5.14 has)"
            return f"madvise: {os.strerror(code)}"
        if self._lock:
            if _libc.mlock(*where):
                _libc.munlock(ctypes.c_void_p(self._ptr), ctypes.c_size_t(self._locked))
                self._lock, self._locked = False, 0
                logger.info("shared memory is not locked: %s", os.strerror(ctypes.get_errno()))
            else:
                self._locked = address + size - self._ptr
        return ""


def _register_function() -> Callable[[int, int], Any] | None:
    import torch

    rbln = getattr(torch, "rbln", None)
    function: Callable[[int, int], Any] | None = getattr(rbln, "register_host_memory", None)
    return function


def _register(ptr: int, size: int) -> str:
    """Register memory with the runtime; "" or why it is not."""
    import torch

    function = _register_function()
    if function is None:
        return "this torch-rbln has no register_host_memory"
    rbln = torch.rbln  # type: ignore[attr-defined]
    if not any(rbln.memory_allocated(index) for index in range(rbln.device_count())):
        return "this process uses no NPU"  # a server, for which none may be opened
    try:
        function(ptr, size)
    except Exception as exc:
        return f"register_host_memory: {type(exc).__name__}: {exc}"
    return ""


def _mapped_file(ptr: int, size: int) -> _File | None:
    """Which file, and where in it, this process has mapped at an address; None if not throughout.

    Locking splits a mapping into neighbours in the list, which count as one.
    """
    found: _File | None = None
    reached = ptr
    with open("/proc/self/maps") as maps:
        for line in maps:
            bounds, _, offset, device, inode, *_ = line.split(maxsplit=5)
            start, end = (int(bound, 16) for bound in bounds.split("-"))
            if start <= reached < end:
                file = (device, inode, int(offset, 16) - start)
                if inode == "0" or found not in (None, file):
                    return None
                found, reached = file, end
                if reached >= ptr + size:
                    return found
    return None


def _available_memory() -> int:
    """Bytes that the host can still give without swapping."""
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 0


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
