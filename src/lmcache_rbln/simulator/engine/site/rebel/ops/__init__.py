# SPDX-License-Identifier: Apache-2.0
"""Operators: their math in plain form, apart from how torch is told about them."""
