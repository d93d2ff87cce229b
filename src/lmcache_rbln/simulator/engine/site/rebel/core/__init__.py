# SPDX-License-Identifier: Apache-2.0
"""Compiling and running graphs."""
