# SPDX-License-Identifier: Apache-2.0
"""The entry point that LMCache loads: ``lmcache_rbln.device_spec:RblnDeviceSpec``.

LMCache loads it while ``lmcache.v1.platform`` initialises. If this module were imported first and
defined the class at import time, LMCache would start inside that import, find this module half
initialised and drop the plugin. So the class is resolved on access, after LMCache has started.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmcache_rbln._rbln_device_spec import RblnDeviceSpec as RblnDeviceSpec

__all__ = ["RblnDeviceSpec"]


def __getattr__(name: str) -> Any:
    if name != "RblnDeviceSpec":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Starts LMCache's registry, which comes back here through the entry point; by then LMCache is
    # in sys.modules, so the second time this is a plain look-up.
    import lmcache.v1.platform  # noqa: F401

    from lmcache_rbln._rbln_device_spec import RblnDeviceSpec

    return RblnDeviceSpec
