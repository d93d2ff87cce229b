# SPDX-License-Identifier: Apache-2.0
"""Taking the backend name ``rbln`` over from the backend that LMCache bundles.

What: the bundled spec's class gets the name ``rbln-bundled`` and is available only when that name
is pinned.
Why: LMCache builds bundled specs first and ignores a second spec of the same name, so a plugin
could never be selected as ``rbln``.
Versions: 0.5.4, 0.5.5 (``lmcache.v1.platform.rbln``), 0.5.6 (``lmcache.v1.platform.devices.rbln``).
Obsolete: once LMCache lets an entry point replace a bundled backend, or bundles none.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import importlib_metadata

from lmcache_rbln._log import logger_of

_logger = logger_of("takeover")

BACKEND_NAME = "rbln"
BUNDLED_NAME = "rbln-bundled"
#: LMCache's variable that pins a backend by name.
PIN_VARIABLE = "LMCACHE_DEVICE_BACKEND"
#: The entry-point group that LMCache 0.5.4 and later read.
ENTRY_POINT_GROUP = "lmcache.device_plugins"

_BUNDLED_MODULES = ("lmcache.v1.platform.devices.rbln", "lmcache.v1.platform.rbln")

_taken_over = ""


def pinned_backend() -> str:
    """The backend that the environment pins, as LMCache reads it: stripped, lower case; "" if none."""
    return os.environ.get(PIN_VARIABLE, "").strip().lower()


def taken_over() -> str:
    """The bundled class whose name was taken over, as ``module.Class``; "" if there was none."""
    return _taken_over


def take_over() -> None:
    """Give the bundled backend its other name; called while LMCache loads the entry point.

    If the bundled class is not as expected, it is left alone and a WARNING says so: LMCache then
    keeps its bundled backend and ignores this one.
    """
    global _taken_over
    for module_name in _BUNDLED_MODULES:
        module = sys.modules.get(module_name)
        bundled: Any = getattr(module, "RblnDeviceSpec", None)
        if module is None:
            continue
        surprise = _surprise(bundled)
        if surprise:
            _logger().warning(
                "lmcache-rbln leaves LMCache's bundled backend %s in place, and LMCache will "
                "ignore lmcache-rbln: %s. This release of LMCache is not supported; see the "
                "README for those that are.",
                module_name,
                surprise,
            )
            continue
        _rename(bundled)
        _taken_over = f"{module_name}.{bundled.__name__}"


def _surprise(bundled: Any) -> str:
    """What about the bundled class differs from what the take-over relies on; "" if nothing."""
    from lmcache.v1.platform.base.device_spec import DeviceSpec

    if not (isinstance(bundled, type) and issubclass(bundled, DeviceSpec)):
        return f"RblnDeviceSpec is {bundled!r}, not a DeviceSpec"
    try:
        name = bundled().backend_name
    except Exception as exc:
        return f"its backend_name cannot be read ({exc!r})"
    if name != BACKEND_NAME:
        return f"its backend_name is {name!r}, expected {BACKEND_NAME!r}"
    for attribute in ("backend_name", "device_type"):
        if not isinstance(getattr(bundled, attribute, None), property):
            return f"its {attribute} is no property"
    if not callable(getattr(bundled, "is_available", None)):
        return "it has no is_available()"
    return ""


def _rename(bundled: Any) -> None:
    is_available = bundled.is_available

    def is_pinned() -> bool:
        return pinned_backend() == BUNDLED_NAME

    # A device type of its own, unless it is pinned: with two candidates for one device type LMCache
    # asks both for availability, and logs it, at every transfer.
    bundled.device_type = property(lambda self: BACKEND_NAME if is_pinned() else BUNDLED_NAME)
    bundled.backend_name = property(lambda self: BUNDLED_NAME)
    bundled.is_available = lambda self: is_pinned() and is_available(self)


def report_other_providers() -> None:
    """Warn when another distribution provides the backend ``rbln`` too, naming the one LMCache takes.

    LMCache sorts entry points by name and value and keeps the first of a name (0.5.4-0.5.6).
    """
    found = sorted(
        importlib_metadata.entry_points(group=ENTRY_POINT_GROUP, name=BACKEND_NAME),
        key=lambda entry: entry.value,
    )
    if len({entry.value for entry in found}) < 2:
        return
    named = [f"{_distribution(entry)} ({entry.value})" for entry in found]
    _logger().warning(
        "%d installed distributions provide LMCache's backend %r: %s. LMCache uses %s, the first "
        "by name of the entry point's value, and ignores the rest; uninstall the others.",
        len(named),
        BACKEND_NAME,
        ", ".join(named),
        named[0],
    )


def _distribution(entry: importlib_metadata.EntryPoint) -> str:
    dist = entry.dist
    return f"{dist.name} {dist.version}" if dist is not None else "an unknown distribution"
