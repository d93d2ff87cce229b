# SPDX-License-Identifier: Apache-2.0
"""Defining an operator in a namespace that others define operators in too."""

from collections.abc import Callable
from typing import Any

import torch

from ...errors import not_modelled

Function = Callable[..., Any]

# torch's own annotations of this module are partial.
_library: Any = torch.library


class Namespace:
    """Operators of one namespace, with schema, CPU implementation and shape function.

    The implementations are for the CPU: a graph sees device memory as CPU tensors.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        # torch drops the definitions when the library object goes.
        self._library = _library.Library(name, "FRAGMENT")

    def define(self, name: str, schema: str, run: Function, shape: Function) -> None:
        """`schema` is the part in parentheses and after; `shape` maps fake tensors to fakes."""
        self._library.define(f"{name}{schema}")
        self._library.impl(name, run, "CPU")
        _library.register_fake(f"{self.name}::{name}", shape, lib=self._library)

    def refuse(self, name: str) -> None:
        """An operator that has no model: calling it, traced or not, says so.

        A plain function in the operator's place, since a schema would have to be guessed.
        """
        message = str(not_modelled(f"operator {self.name}::{name}"))

        def refused(*args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(message)

        setattr(getattr(torch.ops, self.name), name, refused)
