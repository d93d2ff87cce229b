# SPDX-License-Identifier: Apache-2.0
"""The store of compiled artifacts. Nothing is compiled here, so it is always empty."""

from typing import BinaryIO


def set_dir(path: str) -> None:
    """Where artifacts would go; unused."""


def read_bundle(source: BinaryIO) -> None:
    """Nothing can be read: no bundle was ever written. Returns None, "unreadable" to vLLM-RBLN."""


def write_bundle(destination: BinaryIO) -> int:
    """Number of artifacts written: none."""
    return 0
