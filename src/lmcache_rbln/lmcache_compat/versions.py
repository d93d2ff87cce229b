# SPDX-License-Identifier: Apache-2.0
"""Which releases of LMCache this package is written for and tested with."""

from __future__ import annotations

import re

import importlib_metadata

from lmcache_rbln import __version__
from lmcache_rbln._log import logger_of

#: Each of these is tested on every change.
TESTED = ("0.5.4", "0.5.5", "0.5.6")
#: What the distribution asks for: at least the first, less than the second.
SUPPORTED = ("0.5.4", "0.6")

_logger = logger_of("versions")


def is_tested(version: str) -> bool:
    """Whether this release of LMCache is tested; a local label, as in ``0.5.6+x``, is ignored."""
    return version.partition("+")[0] in TESTED


def is_supported(version: str) -> bool:
    """Whether the distribution's own requirement admits this release of LMCache.

    A pre-release counts as its release.
    """
    low, high = (_release(bound) for bound in SUPPORTED)
    return low <= _release(version) < high


def warn_if_untested() -> None:
    """Log one WARNING where the installed LMCache is none of those that are tested."""
    try:
        found = importlib_metadata.version("lmcache")
    except importlib_metadata.PackageNotFoundError:
        found = "of an unknown version"
    if is_tested(found):
        return
    _logger().warning(
        "lmcache-rbln %s is tested with lmcache %s, and this is lmcache %s: it works where nothing "
        "has changed that lmcache-rbln relies on, and says what has. To be safe: pip install "
        "lmcache==%s",
        __version__,
        ", ".join(TESTED),
        found,
        TESTED[-1],
    )


def _release(version: str) -> tuple[int, ...]:
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, numbers.group().split("."))) if numbers else ()
