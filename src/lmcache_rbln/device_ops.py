# SPDX-License-Identifier: Apache-2.0
"""``RblnDeviceOps``: what LMCache calls to move KV blocks between an NPU and its chunks.

The class is resolved on access, after LMCache has started: LMCache takes it while it initialises
itself, and would find this module half initialised if it were what started LMCache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmcache_rbln._rbln_device_ops import RblnDeviceOps as RblnDeviceOps

__all__ = ["RblnDeviceOps"]


def __getattr__(name: str) -> Any:
    if name != "RblnDeviceOps":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Starts LMCache, which takes the class from here; the second time this is a plain look-up.
    import lmcache  # noqa: F401

    from lmcache_rbln._rbln_device_ops import RblnDeviceOps

    return RblnDeviceOps
