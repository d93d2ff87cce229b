# SPDX-License-Identifier: Apache-2.0
"""The hardware lane: everything that a real NPU can be asked, and one report file of it.

``python -m tests.hardware [--report FILE]``, which is what ``nox -s hardware`` runs, in the
environment that has the vendor's stack. Exit code 0 only if every step ran on a real NPU and
passed: no NPU, a simulated one, or a skipped test is a failure.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
CLI = (sys.executable, "-m", "lmcache_rbln.cli")
PYTEST = ("-m", "pytest", "-m", "hardware", "tests/hardware", "-v", "-p", "no:cacheprovider")


@dataclass
class Step:
    """One step of the lane.

    Attributes:
        name: its name.
        passed: whether it did what it is there for, on a real NPU.
        found: the outcome in one line.
        seconds: how long it took.
        details: what the step wrote, as JSON.
        output: the last lines of its output.
    """

    name: str
    passed: bool = False
    found: str = ""
    seconds: float = 0.0
    details: Any = field(default_factory=dict)
    output: str = ""


def main(argv: list[str] | None = None) -> int:
    """Run the lane.

    Returns:
        0 if every step passed on a real NPU, else 1.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.hardware", description=__doc__)
    parser.add_argument("--report", type=Path, default=Path("hardware-report.json"))
    args = parser.parse_args(argv)
    console = Console()
    steps: list[Step] = []
    with tempfile.TemporaryDirectory(prefix="lmcache-rbln-hardware-") as folder:
        for name, run in STEPS.items():
            console.print(f"{name} ...", highlight=False)
            started = time.monotonic()
            step = run(Step(name), Path(folder))
            step.seconds = round(time.monotonic() - started, 1)
            steps.append(step)
            if name == "doctor" and not step.passed:
                # Without an NPU the rest could only be skipped or simulated.
                break
    passed = len(steps) == len(STEPS) and all(step.passed for step in steps)
    args.report.write_text(json.dumps(report(steps, passed), indent=2) + "\n")
    show(console, steps)
    console.print(f"Report: {args.report.resolve()}", highlight=False, soft_wrap=True)
    if passed:
        console.print("Validated on this host's NPU.", style="bold green")
    else:
        missing = ", ".join(name for name in STEPS if name not in {step.name for step in steps})
        console.print(
            "Nothing about hardware is validated." if missing else "The validation failed.",
            style="bold red",
        )
    return 0 if passed else 1


def command(step: Step, arguments: list[str], seconds: float) -> int | None:
    """Run one command, keep the end of its output; its exit code, None if it hung."""
    log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
    with log:
        try:
            code: int | None = subprocess.run(
                arguments,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "LMCACHE_TRACK_USAGE": "false"},
                timeout=seconds,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
        log.seek(0)
        step.output = "\n".join(log.read().splitlines()[-80:])
    step.found = "ended by the time limit" if code is None else f"exit code {code}"
    return code


def doctor(step: Step, folder: Path) -> Step:
    """The stack is complete, and a real NPU can be opened."""
    done = subprocess.run(
        [*CLI, "doctor", "--json", "--open", "--no-engine"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        # Doctor ends by itself, after its probe's 300 s at the latest.
        timeout=900,
        check=False,
    )
    try:
        step.details = json.loads(done.stdout)
    except json.JSONDecodeError:
        step.found, step.output = f"exit code {done.returncode}", done.stderr[-4000:]
        return step
    bad = [check for check in step.details["checks"] if check["status"] == "failed"]
    if step.details["simulated"]:
        step.found = "no NPU: this environment has the simulated runtime"
    elif bad:
        step.found = "; ".join(f"{check['name']}: {check['found']}" for check in bad)
    else:
        step.passed, step.found = True, "every NPU could be opened"
    return step


def tests(step: Step, folder: Path) -> Step:
    """The tests that are marked ``hardware``; one that is skipped counts as failed."""
    junit = folder / "junit.xml"
    code = command(
        step,
        [sys.executable, *PYTEST, f"--junitxml={junit}"],
        3600,
    )
    if junit.exists():
        step.details = counts(junit)
        step.found = ", ".join(f"{number} {what}" for what, number in step.details.items())
        passed = step.details["passed"]
        step.passed = code == 0 and passed == sum(step.details.values()) > 0
    return step


def counts(junit: Path) -> dict[str, int]:
    """How many tests passed, failed and were skipped, by pytest's JUnit report."""
    found = {"passed": 0, "failed": 0, "skipped": 0}
    for case in ET.parse(junit).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "passed"
        found["skipped" if "skipped" in kinds else outcome] += 1
    return found


def demo(step: Step, folder: Path) -> Step:
    """The demo is exact, and says that it ran on an NPU."""
    code = command(step, [*CLI, "demo", "--json", str(folder / "demo.json")], 900)
    step.details = read(folder / "demo.json")
    device = step.details.get("device", "no device")
    step.passed = code == 0 and device == "NPU" and step.details.get("exact") is True
    step.found = f"{'exact' if step.passed else step.found} on {device}"
    return step


def bench(step: Step, folder: Path) -> Step:
    """The benchmark's figures of this NPU."""
    code = command(step, [*CLI, "bench", "--json", str(folder / "bench.json")], 3600)
    step.details = read(folder / "bench.json")
    step.passed = code == 0 and bool(step.details)
    return step


STEPS: dict[str, Callable[[Step, Path], Step]] = {
    "doctor": doctor,
    "tests": tests,
    "demo": demo,
    "bench": bench,
}


def read(path: Path) -> Any:
    """A step's own report; empty if it wrote none."""
    try:
        return json.loads(path.read_text())
    except (OSError, json.JSONDecodeError):
        return {}


def report(steps: list[Step], passed: bool) -> dict[str, Any]:
    """What the report file holds."""
    return {
        "passed": passed,
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "host": {
            "name": platform.node(),
            "kernel": platform.release(),
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        },
        "settings": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("LMCACHE_RBLN_", "RBLN_"))
        },
        "steps": [asdict(step) for step in steps],
    }


def show(console: Console, steps: list[Step]) -> None:
    """The table at the end."""
    table = Table("step", "", "seconds", "found", title="hardware lane")
    for step in steps:
        verdict = "[green]passed[/]" if step.passed else "[bold red]failed[/]"
        table.add_row(step.name, verdict, f"{step.seconds:.1f}", step.found)
    console.print(table)
