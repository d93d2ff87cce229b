# SPDX-License-Identifier: Apache-2.0
"""Settings that are on unless they are set to 0."""

from __future__ import annotations

import functools
import os

from lmcache_rbln._log import logger_of

_logger = logger_of("settings")


def is_on(variable: str) -> bool:
    """Whether a switch is on: it is, unless the variable is ``0``.

    A value that is neither 0 nor 1 leaves it on, and is warned of once a process: what is switched
    here protects the cache, or costs nothing but time.
    """
    text = os.environ.get(variable, "").strip()
    if text not in ("", "0", "1"):
        _warn_once(variable, text)
    return text != "0"


@functools.cache
def _warn_once(variable: str, text: str) -> None:
    _logger().warning(
        "%s=%r is unknown; expected 0 (off) or 1 (on, the default): it stays on", variable, text
    )
