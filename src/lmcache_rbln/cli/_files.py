# SPDX-License-Identifier: Apache-2.0
"""Files that commands write."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def unwritable(path: Path) -> str:
    """Why a report cannot be written there; "" if nothing speaks against it."""
    if path.is_dir():
        return f"{path} is a folder, expected a file"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return f"{path} may not be written"
    return ""


def write_report(path: Path, report: Any) -> str:
    """Write a report as JSON; "" or why it could not be written."""
    try:
        path.write_text(json.dumps(report, indent=2) + "\n")
    except OSError as error:
        return f"{path} could not be written: {error.strerror}"
    return ""
