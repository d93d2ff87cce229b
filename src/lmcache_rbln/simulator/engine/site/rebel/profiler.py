# SPDX-License-Identifier: Apache-2.0
"""The device profiler, which has nothing to profile here."""

from .errors import not_modelled


def start() -> None:
    """Raises: NotImplementedError, always."""
    raise not_modelled("the device profiler")


def done() -> None:
    """Raises: NotImplementedError, always."""
    raise not_modelled("the device profiler")
