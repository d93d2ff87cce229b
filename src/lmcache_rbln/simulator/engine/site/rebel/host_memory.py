# SPDX-License-Identifier: Apache-2.0
"""Host memory that the device reads without a staging copy."""

from typing import Any

from .errors import not_modelled


class HugeHostBuffer:
    """Raises `NotImplementedError` when constructed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise not_modelled("rebel.host_memory.HugeHostBuffer")
