# SPDX-License-Identifier: Apache-2.0
"""The hardware lane never passes without a real NPU, and never by skipping."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hardware import lane

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("runtime", ["simulated", "none"])
def test_it_fails_without_an_npu(runtime: str, tmp_path: Path) -> None:
    environment = {**os.environ, "RBLN_SIM_HOST": f"lane-{os.getpid()}"}
    if runtime == "none":
        folders = environment["LD_LIBRARY_PATH"].split(os.pathsep)
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(
            folder for folder in folders if not Path(folder, "librbln.so").exists()
        )
    done = subprocess.run(
        [sys.executable, "-m", "tests.hardware", "--report", tmp_path / "report.json"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 1, done.stdout
    assert "Nothing about hardware is validated." in done.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["passed"] is False
    (step,) = report["steps"]
    assert step["name"] == "doctor"
    why = "no NPU: this environment has the simulated runtime"
    assert (why if runtime == "simulated" else "librbln.so is not found") in step["found"]
    assert step["details"]["versions"]["torch-rbln"] == "0.12.0"
    assert report["host"]["cores"] == os.cpu_count()


@pytest.mark.parametrize(
    ("cases", "passes"),
    [
        ("<testcase/><testcase/>", True),
        ("<testcase/><testcase><skipped/></testcase>", False),
        ("<testcase/><testcase><failure/></testcase>", False),
        ("<testcase><error/></testcase>", False),
        ("", False),
    ],
)
def test_a_skipped_test_is_no_pass(
    cases: str, passes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def command(step: lane.Step, arguments: list[str], seconds: float) -> int:
        (tmp_path / "junit.xml").write_text(
            f"<testsuites><testsuite>{cases}</testsuite></testsuites>"
        )
        return 0

    monkeypatch.setattr(lane, "command", command)
    assert lane.tests(lane.Step("tests"), tmp_path).passed is passes


@pytest.mark.parametrize(
    ("page", "passes"),
    [
        ({"device": "NPU", "exact": True}, True),
        ({"device": "simulated NPU", "exact": True}, False),
        ({"device": "NPU", "exact": False}, False),
        ({}, False),
    ],
)
def test_the_demo_must_have_run_on_an_npu(
    page: dict[str, object], passes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane, "command", lambda *_: 0)
    (tmp_path / "demo.json").write_text(json.dumps(page))
    assert lane.demo(lane.Step("demo"), tmp_path).passed is passes


def test_a_command_that_hangs_is_ended() -> None:
    step = lane.Step("x")
    assert lane.command(step, [sys.executable, "-c", "import time; time.sleep(60)"], 0.5) is None
    assert step.found == "ended by the time limit"
    assert lane.command(step, [sys.executable, "-c", "print('said'); raise SystemExit(3)"], 60) == 3
    assert (step.found, step.output) == ("exit code 3", "said")
