# SPDX-License-Identifier: Apache-2.0
"""The newest LMCache that is not supported yet: installed, tried, and reported.

``python -m tests.next [--report FILE] [-- PYTEST ARGUMENTS]``, which is what ``nox -s next`` runs. It
installs LMCache into the environment that it runs in. Exit code 0 whatever the tests come to, since
upstream may move; 1 where the lane itself could not do its work.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from lmcache_rbln.lmcache_compat import versions

ROOT = Path(__file__).parents[2]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install")
FOLDERS = ("tests/unit", "tests/stub", "tests/next")

#: Must stay as they are: the vendor's.
PINNED = ("torch", "torch-rbln")

#: pytest's exit codes that are about the tests; the others are about the run.
ALL_PASSED, SOME_FAILED = 0, 1

#: What an LMCache must be able to do before a test of it says anything.
USABLE = "import lmcache, lmcache.lmcache_native"

#: What LMCache and this package say at the start of a worker, and which of them knows blocks-first.
START = """
import lmcache
import lmcache.v1.gpu_connector.kv_format.detectors.registry
from lmcache.v1.platform import current_device_spec as spec
from lmcache_rbln.lmcache_compat import blocks_first
print("BACKEND", f"{type(spec).__module__}.{type(spec).__qualname__}")
print("BLOCKS_FIRST", "LMCache" if blocks_first.is_native() else
      "lmcache-rbln" if blocks_first.is_installed() else "nobody")
"""


class LaneError(Exception):
    """The lane itself could not do its work."""


@dataclass
class Report:
    """What was found.

    Attributes:
        tested: the newest release that every change is tested on.
        version: the LMCache that was tried; "" if there is none beyond ``tested``.
        unusable: newer ones that could not be installed or imported, and why.
        backend: the backend that LMCache selected, on the simulated NPU.
        blocks_first: who makes blocks-first caches known.
        said: what this package logged at the start.
        counts: tests passed, failed, skipped.
        failed: failed tests, and the first line of what was wrong.
    """

    tested: str
    version: str = ""
    unusable: dict[str, str] = field(default_factory=dict)
    backend: str = ""
    blocks_first: str = ""
    said: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def main(argv: list[str] | None = None) -> int:
    """Run the lane.

    Returns:
        0 if it could report, 1 if not.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.next", description=__doc__)
    parser.add_argument("--report", type=Path, default=Path("next-report.json"))
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    args = parser.parse_args(argv)
    console = Console(highlight=False, soft_wrap=True)
    report = Report(versions.TESTED[-1])
    try:
        report.version = install_newest(report, console)
        if report.version:
            start(report)
            run_tests(report, args.pytest)
    except LaneError as exc:
        console.print(f"nox -s next itself failed: {exc}", style="bold red", markup=False)
        return 1
    show(report, console)
    args.report.write_text(json.dumps(asdict(report), indent=2) + "\n")
    console.print(f"Report: {args.report.resolve()}")
    return 0


def install_newest(report: Report, console: Console) -> str:
    """Install the newest LMCache beyond the tested ones that can be used; its version, or ""."""
    while True:
        version = newest(report.tested, list(report.unusable))
        if version == report.tested:
            return ""
        console.print(f"lmcache {version} ...")
        why = install(version)
        if not why:
            return version
        report.unusable[version] = why


def newest(at_least: str, excluded: list[str]) -> str:
    """The newest LMCache, pre-releases too, that the package index has for this Python.

    Raises:
        LaneError: it does not even have ``at_least``.
    """
    wanted = ",".join([f"lmcache>={at_least}", *(f"!={version}" for version in excluded)])
    options = ("--quiet", "--dry-run", "--ignore-installed", "--no-deps", "--pre", "--report", "-")
    done = run([*PIP, *options, wanted], seconds=600)
    if done.returncode:
        raise LaneError(f"pip finds no {wanted}: {last_error(done.stderr)}")
    (chosen,) = json.loads(done.stdout)["install"]
    return str(chosen["metadata"]["version"])


def install(version: str) -> str:
    """Install that LMCache beside the vendor's PyTorch; why it cannot be used, or ""."""
    pinned = [f"{name}=={importlib.metadata.version(name)}" for name in PINNED]
    done = run([*PIP, "--quiet", f"lmcache=={version}", *pinned], seconds=1800)
    if done.returncode:
        return f"cannot be installed: {last_error(done.stderr)}"
    done = run([sys.executable, "-c", USABLE], seconds=300, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    return f"cannot be imported: {last_error(done.stderr)}" if done.returncode else ""


def start(report: Report) -> None:
    """Let LMCache start on the simulated NPU, and keep what is said."""
    simulate = [sys.executable, "-m", "lmcache_rbln.cli", "simulate", "--"]
    done = run([*simulate, sys.executable, "-c", START], seconds=300)
    words = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
    report.backend = words.get("BACKEND", f"none: {last_error(done.stderr)}")
    report.blocks_first = words.get("BLOCKS_FIRST", "nobody")
    report.said = [plain(line) for line in done.stderr.splitlines() if "lmcache-rbln" in line]


def run_tests(report: Report, arguments: list[str]) -> None:
    """Run the tests that need no server, and those that are about the next LMCache.

    Raises:
        LaneError: pytest did not run them.
    """
    with tempfile.TemporaryDirectory(prefix="lmcache-rbln-next-") as folder:
        junit = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal", "-q"]
        # An upstream name that is gone fails the tests of one module, not the run.
        command += ["--continue-on-collection-errors", "-p", "no:cacheprovider"]
        try:
            code = subprocess.run(
                [*command, f"--junitxml={junit}", *FOLDERS, *arguments],
                cwd=ROOT,
                timeout=5400,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired as exc:
            raise LaneError("the tests did not end") from exc
        if code not in (ALL_PASSED, SOME_FAILED) or not junit.exists():
            raise LaneError(f"pytest ended with exit code {code}")
        read_tests(report, junit)


def read_tests(report: Report, junit: Path) -> None:
    """Count the tests of pytest's JUnit report, and note those that failed."""
    report.counts = {"passed": 0, "failed": 0, "skipped": 0}
    for case in ET.parse(junit).iter("testcase"):
        wrong = [child for child in case if child.tag in ("failure", "error")]
        if wrong:
            name = f"{case.get('classname')}::{case.get('name')}"
            report.failed[name] = plain(wrong[0].get("message") or "").split("\n")[0][:200]
            report.counts["failed"] += 1
        else:
            skipped = any(child.tag == "skipped" for child in case)
            report.counts["skipped" if skipped else "passed"] += 1


def show(report: Report, console: Console) -> None:
    """The report, for a person."""
    console.rule("the next LMCache")
    for version, why in report.unusable.items():
        console.print(f"lmcache {version} {why}", markup=False)
    if not report.version:
        console.print(f"Nothing to try: no usable LMCache is newer than {report.tested}.")
        return
    for name, found in (
        ("lmcache", f"{report.version}; tested on every change: {', '.join(versions.TESTED)}"),
        ("backend selected", report.backend),
        ("blocks-first known by", report.blocks_first),
        ("tests", ", ".join(f"{number} {what}" for what, number in report.counts.items())),
    ):
        console.print(f"[bold]{name}[/]: {escape(found)}")
    for line in report.said:
        console.print(f"  {line}", markup=False)
    for name, why in report.failed.items():
        console.print(f"failed: {name}: {why}", markup=False)
    if report.counts["failed"]:
        console.print(f"lmcache {report.version} needs work: see CONTRIBUTING.md.", style="bold")
    else:
        console.print(f"lmcache {report.version} works as it is.", style="bold")


def run(command: list[str], *, seconds: float, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command and keep what it writes.

    Raises:
        LaneError: it did not end.
    """
    environment: dict[str, Any] = {**os.environ, "LMCACHE_TRACK_USAGE": "false", **env}
    try:
        return subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise LaneError(f"{' '.join(command[:4])} did not end in {seconds:.0f} s") from exc


def plain(text: str) -> str:
    """Without the colours of a log, as they are or as XML writes them."""
    return re.sub(r"(\x1b|#x1B)\[[0-9;]*m", "", text).strip()


def last_error(text: str) -> str:
    """The last line that says what went wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    marked = [line for line in lines if "error" in line.lower()]
    return (marked or lines or ["it said nothing"])[-1][:300]
