# SPDX-License-Identifier: Apache-2.0
"""Whether LMCache is still what a touch of it was written for."""

from __future__ import annotations

import inspect
import sys
from importlib.machinery import PathFinder
from typing import Any


class ChangedError(Exception):
    """LMCache is not what a touch was written for; caught by each touch, which then steps aside."""


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


def require(owner: Any, method: str, *parameters: str) -> Any:
    """The method, or function of a module, if it has these parameters.

    Raises:
        AttributeError, TypeError, ValueError: There is none, or none whose parameters are known.
        ChangedError: It lacks one of them.
    """
    return _function(owner, method, parameters, others_too=True)


def require_exactly(owner: Any, method: str, *parameters: str) -> Any:
    """As ``require``, for a method that is replaced: these parameters, in this order, no others."""
    return _function(owner, method, parameters, others_too=False)


def _function(owner: Any, name: str, parameters: tuple[str, ...], others_too: bool) -> Any:
    function = getattr(owner, name)
    found = list(inspect.signature(function).parameters)
    as_expected = set(parameters) <= set(found) if others_too else found == ["self", *parameters]
    if not as_expected:
        raise ChangedError(f"{owner.__name__}.{name}({', '.join(found)})")
    return function
