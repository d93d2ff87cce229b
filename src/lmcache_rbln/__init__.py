# SPDX-License-Identifier: Apache-2.0
"""LMCache on Rebellions NPUs.

LMCache finds this package by its entry point; nothing needs to be imported by hand. Importing it
imports neither torch nor LMCache.
"""

__version__ = "0.12.0"
