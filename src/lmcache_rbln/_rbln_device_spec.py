# SPDX-License-Identifier: Apache-2.0
"""``RblnDeviceSpec``; import it from ``lmcache_rbln.device_spec``, which orders the imports."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import importlib_metadata
from lmcache.logging import init_logger
from lmcache.v1.platform.base.device_spec import DeviceSpec

from lmcache_rbln import __version__, npu
from lmcache_rbln.lmcache_compat import (
    blocks_first,
    registration,
    server_guard,
    takeover,
    versions,
    worker_guard,
)

if TYPE_CHECKING:
    from lmcache.v1.platform.base.device_ops import DeviceOps
    from lmcache.v1.platform.base.pin_memory import PinMemoryBackend

logger = init_logger("lmcache_rbln.device_spec")

#: Lines written in this process: each reason is said once, however often LMCache asks.
_said: set[str] = set()


def _say(level: str, message: str) -> None:
    if message not in _said:
        _said.add(message)
        getattr(logger, level)("%s", message)


class RblnDeviceSpec(DeviceSpec):  # type: ignore[misc]  # LMCache ships no type information
    """How LMCache finds an RBLN NPU and where it gets the operations for it."""

    @property
    def device_type(self) -> str:
        """torch's name of the device: ``"rbln"``."""
        return takeover.BACKEND_NAME

    @property
    def backend_name(self) -> str:
        """LMCache's name of this backend, equal to the entry point's: ``"rbln"``."""
        return takeover.BACKEND_NAME

    @property
    def torch_module_name(self) -> str:
        """``torch.rbln``."""
        return takeover.BACKEND_NAME

    @property
    def ops_cls(self) -> type[DeviceOps]:
        """The operations; imported on access, so that finding the device costs nothing."""
        from lmcache_rbln.device_ops import RblnDeviceOps

        return RblnDeviceOps

    @property
    def pin_memory_backend(self) -> type[PinMemoryBackend]:
        """What makes the server's shared memory ready for transfers; imported on access."""
        from lmcache_rbln.pin_memory import RblnPinMemoryBackend

        return RblnPinMemoryBackend

    def get_ops(self) -> DeviceOps:
        """Return the process's operations; the first call is LMCache's selection, and is logged."""
        bundled = takeover.taken_over()
        _say(
            "info",
            f"lmcache-rbln {__version__} is LMCache's backend {self.backend_name!r} "
            f"({_stack()})"
            + (
                f", instead of the bundled {bundled} (still there as "
                f"{takeover.PIN_VARIABLE}={takeover.BUNDLED_NAME})"
                if bundled
                else ""
            ),
        )
        return super().get_ops()

    def is_available(self) -> bool:
        """Whether torch-rbln sees an NPU. Never raises, opens none; says once why there is none."""
        pin = takeover.pinned_backend()
        if pin == takeover.BUNDLED_NAME:
            _say(
                "info",
                f"lmcache-rbln steps aside: {takeover.PIN_VARIABLE}={takeover.BUNDLED_NAME} "
                "selects the RBLN backend bundled with LMCache",
            )
            return False
        if takeover.left_in_place() and pin != takeover.BACKEND_NAME:
            return False  # Two backends for one device, and LMCache would not start.
        seen = npu.status()
        if not seen.available:
            if pin == takeover.BACKEND_NAME:
                _say("error", f"{takeover.PIN_VARIABLE}={pin} asks for an NPU, but {seen.reason}")
            elif seen.installed or _device_type_asked() == self.device_type:
                _say(
                    "warning",
                    f"LMCache will not use the NPU backend {pin or 'rbln'!r}: {seen.reason}",
                )
        return seen.available

    # One capability, two names: 0.5.4 and 0.5.5 ask the first, 0.5.6 the second.
    def is_handle_transfer_available(self) -> bool:
        """LMCache-driven transfer is not supported: RBLN memory has no handle to pass on."""
        return False

    def is_lmcache_driven_available(self) -> bool:
        """LMCache-driven transfer is not supported: RBLN memory has no handle to pass on."""
        return False


def _stack() -> str:
    """What the backend is selected on: versions, and how many devices torch offers."""
    parts = []
    for name in ("lmcache", "torch", "torch-rbln"):
        with contextlib.suppress(importlib_metadata.PackageNotFoundError):
            parts.append(f"{name} {importlib_metadata.version(name)}")
    count = npu.status().count
    return ", ".join([*parts, f"{count} rbln device{'' if count == 1 else 's'}"])


def _device_type_asked() -> str:
    return os.environ.get("DEVICE_TYPE", "").strip().lower()


versions.warn_if_untested()
takeover.take_over()
takeover.report_other_providers()
blocks_first.install_when_needed()
registration.install_when_needed()
server_guard.install_when_needed()
worker_guard.install_when_needed()
