# SPDX-License-Identifier: Apache-2.0
"""Whether LMCache still has a module that a touch waits for."""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder


def has_module(name: str) -> bool:
    """Whether LMCache has the module of this full name; imports nothing.

    A hook that waits for a module that is gone would never run, and nobody would be told.
    """
    package, *parts = name.split(".")
    folders = list(sys.modules[package].__path__)
    for part in parts:
        found = PathFinder.find_spec(part, folders)
        if found is None:
            return False
        folders = list(found.submodule_search_locations or ())
    return True
