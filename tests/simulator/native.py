# SPDX-License-Identifier: Apache-2.0
"""Calls the stand-in directly, for what torch-rbln never asks of a runtime."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

OPS = "RKSt6vectorISt5tupleIJmmmEESaIS2_EE"
SUCCESS, FAILURE, INVALID = range(3)


class Op(ctypes.Structure):
    """``std::tuple<source, destination, size>``; libstdc++ lays its members out backwards."""

    _fields_ = [
        ("size", ctypes.c_uint64),
        ("destination", ctypes.c_uint64),
        ("source", ctypes.c_uint64),
    ]


class Vector(ctypes.Structure):
    """``std::vector``: begin, end, end of the storage."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("begin", "end", "storage_end")]


class Runtime:
    """The library's functions; each call returns its return code."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("librbln.so")

    def _call(self, name: str, arguments: str, *values: object) -> int:
        function = getattr(self.library, f"_ZN4rbln{len(name)}{name}E{arguments}")
        return int(function(*values))

    def device_count(self) -> int:
        """Visible NPUs; -1 when the call fails."""
        count = ctypes.c_int()
        code = self.library.rbln_get_device_count(ctypes.byref(count))
        return count.value if code == SUCCESS else -1

    def register(self, device: int, *npus: int) -> int:
        """Opens NPUs as one logical device."""
        return int(
            self.library.rbln_register_device_id(
                device, (ctypes.c_int * len(npus))(*npus), len(npus)
            )
        )

    def malloc(self, size: int, device: int = 0) -> int:
        """Address of fresh device memory; 0 when there is none to be had."""
        address = ctypes.c_uint64()
        code = self._call(
            "rbln_malloc_lazy", "jmRm", device, ctypes.c_uint64(size), ctypes.byref(address)
        )
        return address.value if code == SUCCESS else 0

    def free(self, address: int) -> int:
        """Frees device memory."""
        return self._call("rbln_free", "m", ctypes.c_uint64(address))

    def copy(self, direction: str, source: int, destination: int, size: int) -> int:
        """One synchronous copy; direction is h2v, v2h or v2v."""
        return self._call(
            f"rbln_memcpy_{direction}", "mmm", *map(ctypes.c_uint64, (source, destination, size))
        )

    def copy_async(self, direction: str, source: int, destination: int, size: int) -> int:
        """One asynchronous copy on the calling thread's current stream."""
        return self._call(
            f"rbln_memcpy_{direction}_async",
            "mmmPm",
            *map(ctypes.c_uint64, (source, destination, size)),
            None,
        )

    def bulk(self, direction: str, ops: Iterable[tuple[int, int, int]]) -> int:
        """One bulk call of (source, destination, size)."""
        entries = [Op(size, destination, source) for source, destination, size in ops]
        array = (Op * len(entries))(*entries)
        begin = ctypes.addressof(array)
        end = begin + ctypes.sizeof(array)
        return self._call(
            f"rbln_memcpy_{direction}_multi", OPS, ctypes.byref(Vector(begin, end, end))
        )

    def synchronize(self, device: int = 0) -> int:
        """Waits for every stream of the device."""
        return self._call("rbln_device_synchronize", "j", device)
