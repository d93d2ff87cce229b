# SPDX-License-Identifier: Apache-2.0
"""Loggers in LMCache's format and at its level, for modules that LMCache loads while it starts."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable


def logger_of(name: str) -> Callable[[], logging.Logger]:
    """A function that returns LMCache's logger ``lmcache_rbln.<name>``, made when it is first called.

    Not at import: importing ``lmcache.logging`` starts LMCache, which then finds the importing
    module half initialised and drops the plugin.
    """
    return functools.cache(functools.partial(_make, f"lmcache_rbln.{name}"))


def _make(name: str) -> logging.Logger:
    from lmcache.logging import init_logger

    made: logging.Logger = init_logger(name)
    return made
