# SPDX-License-Identifier: Apache-2.0
"""Helpers of the NIXL connectors, which are imported with vLLM-RBLN and not used here."""

from typing import Any

from .errors import not_modelled


def aligned_tensor(*args: Any, **kwargs: Any) -> Any:
    """Raises: NotImplementedError, always."""
    raise not_modelled("rebel.kv_cache.aligned_tensor()")
