# SPDX-License-Identifier: Apache-2.0
"""The lane for the next LMCache: upstream may move, its own work may not fail in silence."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lmcache_rbln.lmcache_compat import versions
from tests.next import lane

TESTED = versions.TESTED[-1]

Answer = subprocess.CompletedProcess[str]


def answer(code: int = 0, out: str = "", err: str = "") -> Answer:
    return subprocess.CompletedProcess([], code, out, err)


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A package index with some releases of LMCache, some of which cannot be used."""

    def make(newest_first: list[str], broken: dict[str, str] | None = None) -> None:
        monkeypatch.setattr(
            lane,
            "newest",
            lambda at_least, excluded: next(v for v in newest_first if v not in excluded),
        )
        monkeypatch.setattr(lane, "install", lambda version: (broken or {}).get(version, ""))

    return make


def test_the_newest_is_taken(index: Any) -> None:
    index(["0.5.8", "0.5.7rc2", TESTED])
    report = lane.Report(TESTED)
    assert lane.install_newest(report, Console()) == "0.5.8"
    assert report.unusable == {}


def test_what_cannot_be_used_is_reported_and_the_next_one_taken(index: Any) -> None:
    index(["0.6.0", "0.5.8", "0.5.7rc2", TESTED], {"0.6.0": "no wheel", "0.5.8": "no module"})
    report = lane.Report(TESTED)
    assert lane.install_newest(report, Console()) == "0.5.7rc2"
    assert report.unusable == {"0.6.0": "no wheel", "0.5.8": "no module"}


@pytest.mark.parametrize("broken", [{}, {"0.5.7rc2": "cannot be installed: torch"}])
def test_nothing_newer(
    broken: dict[str, str], index: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index([*broken, TESTED], broken)
    assert lane.main(["--report", str(tmp_path / "report.json")]) == 0
    assert f"Nothing to try: no usable LMCache is newer than {TESTED}" in capsys.readouterr().out
    assert json.loads((tmp_path / "report.json").read_text())["unusable"] == broken


def test_an_index_without_lmcache_fails_the_lane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lane, "run", lambda *_, **__: answer(1, err="ERROR: no network\n"))
    assert lane.main(["--report", str(tmp_path / "report.json")]) == 1
    assert "nox -s next itself failed" in capsys.readouterr().out
    assert not (tmp_path / "report.json").exists()


def test_pip_is_asked_for_pre_releases_and_the_vendors_torch_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], *, seconds: float, **env: str) -> Answer:
        asked.append(command)
        if "--dry-run" in command:
            return answer(0, json.dumps({"install": [{"metadata": {"version": "0.9"}}]}))
        return answer(1, err="Traceback\nERROR: conflict\n")

    monkeypatch.setattr(lane, "run", run)
    assert lane.newest("0.5.6", ["1.0rc1"]) == "0.9"
    assert "--pre" in asked[0]
    assert asked[0][-1] == "lmcache>=0.5.6,!=1.0rc1"
    assert lane.install("0.9") == "cannot be installed: ERROR: conflict"
    assert asked[1][-3] == "lmcache==0.9"
    assert [text.split("==")[0] for text in asked[1][-2:]] == ["torch", "torch-rbln"]


@pytest.mark.parametrize(
    ("code", "cases", "lane_code", "words"),
    [
        (0, "<testcase/>", 0, "works as it is"),
        (1, '<testcase/><testcase><failure message="gone&#10;x"/></testcase>', 0, "needs work"),
        (1, '<testcase><error message="cannot import"/></testcase>', 0, "needs work"),
        (2, "<testcase/>", 1, "pytest ended with exit code 2"),
        (4, "", 1, "pytest ended with exit code 4"),
        (5, "", 1, "pytest ended with exit code 5"),
    ],
)
def test_outcomes(
    code: int,
    cases: str,
    lane_code: int,
    words: str,
    index: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def pytest_run(command: list[str], **_: Any) -> Answer:
        (junit,) = [part for part in command if part.startswith("--junitxml=")]
        Path(junit.partition("=")[2]).write_text(f"<testsuites>{cases}</testsuites>")
        return answer(code)

    index(["0.5.7rc2", TESTED])
    monkeypatch.setattr(lane, "start", lambda report: None)
    monkeypatch.setattr(lane.subprocess, "run", pytest_run)
    report = tmp_path / "report.json"
    assert lane.main(["--report", str(report)]) == lane_code
    out = capsys.readouterr().out
    assert words in out
    assert report.exists() is (lane_code == 0)
    if "message" in cases:
        assert list(json.loads(report.read_text())["failed"].values()) in (
            ["gone"],
            ["cannot import"],
        )


def test_what_is_said_at_the_start_is_kept() -> None:
    """For real, on the LMCache that is installed here."""
    report = lane.Report(TESTED)
    lane.start(report)
    assert report.backend == "lmcache_rbln._rbln_device_spec.RblnDeviceSpec"
    assert report.blocks_first in ("LMCache", "lmcache-rbln")
    assert any("is LMCache's backend 'rbln'" in line for line in report.said)
    assert not any("\x1b" in line for line in report.said)
