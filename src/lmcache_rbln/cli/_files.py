# SPDX-License-Identifier: Apache-2.0
"""Files that commands write."""

from __future__ import annotations

from pathlib import Path


def unwritable(path: Path) -> str:
    """Why a report cannot be written there; "" if nothing speaks against it."""
    if path.is_dir():
        return f"{path} is a folder, expected a file"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    return ""
