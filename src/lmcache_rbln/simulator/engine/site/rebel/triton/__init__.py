# SPDX-License-Identifier: Apache-2.0
"""Kernels written in the vendor's Triton dialect are kept by name and never launched: the graph
runner knows the operators that they implement."""

from collections.abc import Callable
from typing import Any

from ..errors import not_modelled
from . import language

__all__ = ["Kernel", "jit", "language"]


class Kernel:
    """A kernel's name."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__name__ = function.__name__

    def warmup(self, *args: Any, **kwargs: Any) -> Any:
        """Raises: NotImplementedError, always."""
        raise not_modelled(f"launching Triton kernel {self.__name__}")


def jit(function: Callable[..., Any]) -> Kernel:
    """Decorator of a kernel."""
    return Kernel(function)
