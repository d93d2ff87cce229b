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

import inspect
import os
from collections.abc import Iterator
from typing import Any

import importlib_metadata

from lmcache_rbln._log import logger_of
from lmcache_rbln.lmcache_compat.relied_on import ChangedError

_logger = logger_of("takeover")

BACKEND_NAME = "rbln"
BUNDLED_NAME = "rbln-bundled"
#: LMCache's variable that pins a backend by name.
PIN_VARIABLE = "LMCACHE_DEVICE_BACKEND"
#: The entry-point group that LMCache 0.5.4 and later read.
ENTRY_POINT_GROUP = "lmcache.device_plugins"

_taken_over = ""
_left_in_place = ""


def pinned_backend() -> str:
    """The backend that the environment pins, as LMCache reads it: stripped, lower case; "" if none."""
    return os.environ.get(PIN_VARIABLE, "").strip().lower()


def taken_over() -> str:
    """The bundled class whose name was taken over, as ``module.Class``; "" if there was none."""
    return _taken_over


def left_in_place() -> str:
    """The bundled class that could not be taken over, as ``module.Class``; "" if there is none."""
    return _left_in_place


def take_over() -> None:
    """Give the bundled backend its other name; called while LMCache loads the entry point.

    A bundled class that is not as expected is left as it is, with a WARNING: LMCache then uses it.
    """
    global _taken_over, _left_in_place
    for bundled in _bundled():
        name = f"{bundled.__module__}.{bundled.__qualname__}"
        try:
            _check(bundled)
            _rename(bundled)
        except ChangedError as exc:
            _left_in_place = name
            _logger().warning(
                "lmcache-rbln leaves LMCache's bundled backend %s in place, and LMCache will use "
                "that one: %s. This release of LMCache is not supported; see the README for those "
                "that are.",
                name,
                exc,
            )
        else:
            _taken_over = name


def _bundled() -> Iterator[Any]:
    """LMCache's own specs for RBLN, wherever it keeps them."""
    from lmcache.v1.platform.base.device_spec import DeviceSpec

    left = list(DeviceSpec.__subclasses__())
    while left:
        spec = left.pop()
        left += spec.__subclasses__()
        if spec.__module__.startswith("lmcache.") and _is_for_rbln(spec):
            yield spec


def _is_for_rbln(spec: Any) -> bool:
    try:
        made = spec()
        return BACKEND_NAME in (made.backend_name, made.device_type)
    except Exception:
        return BACKEND_NAME in f"{spec.__module__}.{spec.__qualname__}".lower()


def _check(bundled: Any) -> None:
    """Check what the take-over relies on.

    Raises:
        ChangedError: something of it is not so.
    """
    for attribute in ("backend_name", "device_type"):
        if not isinstance(getattr(bundled, attribute, None), property):
            raise ChangedError(f"its {attribute} is no property")
        try:
            found = getattr(bundled(), attribute)
        except Exception as exc:
            raise ChangedError(f"its {attribute} cannot be read ({exc!r})") from exc
        if found != BACKEND_NAME:
            raise ChangedError(f"its {attribute} is {found!r}, expected {BACKEND_NAME!r}")
    is_available = getattr(bundled, "is_available", None)
    if not inspect.isfunction(is_available):
        raise ChangedError("it has no method is_available()")
    if list(inspect.signature(is_available).parameters) != ["self"]:
        raise ChangedError(f"it has is_available{inspect.signature(is_available)}, expected (self)")


def _rename(bundled: Any) -> None:
    """Rename the class, or leave it as it was.

    Raises:
        ChangedError: the class does not take the names, or does not go by them.
    """
    is_available = bundled.is_available

    def is_pinned() -> bool:
        return pinned_backend() == BUNDLED_NAME

    names = {
        "backend_name": property(lambda self: BUNDLED_NAME),
        # A device type of its own, unless it is pinned: with two candidates for one device type
        # LMCache asks both for availability, and logs it, at every transfer.
        "device_type": property(lambda self: BACKEND_NAME if is_pinned() else BUNDLED_NAME),
        "is_available": lambda self: is_pinned() and is_available(self),
    }
    own = {name: vars(bundled)[name] for name in names if name in vars(bundled)}
    try:
        for name, value in names.items():
            setattr(bundled, name, value)
        found = bundled().backend_name
        if found != BUNDLED_NAME:
            raise ChangedError(f"its backend_name stays {found!r}")
    except (ChangedError, AttributeError, TypeError) as exc:
        for name, value in names.items():
            if vars(bundled).get(name) is not value:
                continue
            if name in own:
                setattr(bundled, name, own[name])
            else:
                delattr(bundled, name)
        raise ChangedError(f"it cannot be renamed ({exc})") from exc


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
