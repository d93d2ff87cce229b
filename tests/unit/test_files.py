# SPDX-License-Identifier: Apache-2.0
"""Reports that commands write, or cannot."""

from __future__ import annotations

import json
from pathlib import Path

from lmcache_rbln.cli import _files


def test_a_report(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    assert _files.unwritable(path) == ""
    assert _files.write_report(path, {"a": 1}) == ""
    assert json.loads(path.read_text()) == {"a": 1}
    assert _files.unwritable(path) == ""


def test_no_place_for_a_report(tmp_path: Path) -> None:
    assert _files.unwritable(tmp_path) == f"{tmp_path} is a folder, expected a file"
    nowhere = tmp_path / "none" / "report.json"
    assert _files.unwritable(nowhere) == f"there is no folder {tmp_path / 'none'}"
    assert _files.write_report(Path("/dev/full"), {}) == (
        "/dev/full could not be written: No space left on device"
    )
