# SPDX-License-Identifier: Apache-2.0
"""Which releases of LMCache this package is written for and tested with. Imports nothing."""

from __future__ import annotations

import re

#: Each of these is tested on every change.
TESTED = ("0.5.4", "0.5.5", "0.5.6")
#: What the distribution asks for: at least the first, less than the second.
SUPPORTED = ("0.5.4", "0.6")


def is_tested(version: str) -> bool:
    """Whether this release of LMCache is tested; a local label, as in ``0.5.6+x``, is ignored."""
    return version.partition("+")[0] in TESTED


def is_supported(version: str) -> bool:
    """Whether the distribution's own requirement admits this release of LMCache."""
    low, high = (_release(bound) for bound in SUPPORTED)
    return low <= _release(version) < high


def _release(version: str) -> tuple[int, ...]:
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, numbers.group().split("."))) if numbers else ()
