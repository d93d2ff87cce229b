# SPDX-License-Identifier: Apache-2.0
"""Registers the operators with torch."""

from . import attn, moe, sampling

__all__ = ["attn", "moe", "sampling"]
