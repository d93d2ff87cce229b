# SPDX-License-Identifier: Apache-2.0
"""The command ``lmcache-rbln simulate``, the trace and its report."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from lmcache_rbln.simulator import _report, unique_host


def command(*arguments: str) -> list[str]:
    main = "import sys; from lmcache_rbln.cli import main; sys.exit(main())"
    return [sys.executable, "-c", main, "simulate", *arguments]


@pytest.fixture
def simulate():
    """Run the command in a process that has no runtime yet."""

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("RBLN_") and name != "LD_LIBRARY_PATH"
        }
        return subprocess.run(
            command(*arguments),
            env={**environment, "RBLN_SIM_HOST": unique_host(), "COLUMNS": "120", **variables},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


PRINT = "import os; print(*(os.environ.get(f'RBLN_SIM_{n}') for n in ('NPUS', 'COPY', 'SEED')))"


def test_options_and_variables(simulate):
    result = simulate(
        "--npus", "3", "--copy=0", "--", sys.executable, "-c", PRINT, RBLN_SIM_SEED="5"
    )
    assert (result.stdout, result.returncode) == ("3 0 5\n", 0)
    # The option wins; the separator is optional.
    result = simulate("--seed", "6", sys.executable, "-c", PRINT, RBLN_SIM_SEED="5")
    assert result.stdout == "None None 6\n"


def test_the_command_gets_its_own_options(simulate):
    result = simulate("--", "echo", "--npus", "--report", "-h")
    assert result.stdout == "--npus --report -h\n"


@pytest.mark.parametrize("report", [[], ["--report"]])
def test_exit_codes(simulate, report):
    assert simulate(*report, "--", "sh", "-c", "exit 7").returncode == 7
    assert simulate(*report, "--", "true").returncode == 0
    killed = simulate(*report, "--", "sh", "-c", "kill -9 $$").returncode
    assert killed == (128 + 9 if report else -9)


def test_usage_errors(simulate):
    result = simulate()
    assert result.returncode == 2
    assert "no command given" in result.stderr
    result = simulate("--npus", "many", "--", "true")
    assert result.returncode == 2
    assert "RBLN_SIM_NPUS=many is not valid: expected an integer from 0 to 64" in result.stderr
    result = simulate("--", "true", RBLN_SIM_COPY="maybe")
    assert "RBLN_SIM_COPY=maybe is not valid: expected 0 or 1" in result.stderr
    result = simulate("--", "/nowhere/program")
    assert result.returncode == 127
    assert "command not found: /nowhere/program" in result.stderr
    result = simulate("--trace", "/dev/full", "--", "true")
    assert result.returncode == 2
    assert "RBLN_SIM_TRACE=/dev/full is not valid: expected a file" in result.stderr
    result = simulate("--", "true", CXX="/nowhere/g++")
    assert result.returncode == 2
    assert "needs a C++17 compiler" in result.stderr


@pytest.mark.parametrize("report", [[], ["--report"]])
def test_termination_reaches_the_command(report):
    text = (
        "import signal, sys, time; signal.signal(15, lambda *a: sys.exit(9))\n"
        "print('ready', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen(
        command(*report, "--", sys.executable, "-c", text),
        env={**os.environ, "RBLN_SIM_HOST": unique_host()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 9


PROGRAM = """
import threading, torch
host = torch.ones(16 << 20, dtype=torch.uint8)
device = host.to("rbln")
pinned = host.pin_memory()
stream = torch.rbln.Stream()
def back():
    torch.empty_like(host).copy_(device)
thread = threading.Thread(target=back)
thread.start()
for _ in range(4):
    device.copy_(host)
thread.join()
with torch.rbln.stream(stream):
    pinned.copy_(device, non_blocking=True)
stream.synchronize()
torch._foreach_copy_(list(device[:64].split(16)), list(host[:64].split(16)))
other = device.clone()
del device, other
"""


def test_trace_and_report(simulate, tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("from an earlier run\n")
    result = simulate(
        "--link-gbps=0.1", f"--trace={trace}", "--report", "--", sys.executable, "-c", PROGRAM
    )
    assert result.returncode == 0, result.stderr
    offset = len("from an earlier run\n")
    entries = _report.read_trace(trace, offset)
    assert [entry["kind"] for entry in entries].count("h2v") == 6
    assert {entry["async"] for entry in entries if entry["kind"] == "v2h"} == {True, False}
    (queued,) = [entry for entry in entries if entry["async"]]
    assert queued["stream"] == 1
    assert queued["thread"] != queued["pid"]
    (bulk,) = [entry for entry in entries if entry["entries"] > 1]
    assert (bulk["kind"], bulk["entries"], bulk["bytes"]) == ("h2v", 4, 64)
    assert all(entry["npu"] == entry["device"] == 0 for entry in entries)
    assert all(abs(entry["time"] - time.time()) < 600 for entry in entries)
    report = _report.summarize(entries)
    assert report.kinds["h2v"].bytes == (80 << 20) + 64
    assert report.kinds["h2v"].gbps == pytest.approx(0.1, rel=0.01)
    assert 0 < report.both <= report.shorter
    assert re.search(r"host to device +│ +6 │ +9 │ +80\.0 │", result.stderr), result.stderr
    assert "both directions of the link at once" in result.stderr


def test_a_report_of_nothing(simulate):
    result = simulate("--report", "--", "echo", "hello")
    assert result.stdout == "hello\n"
    assert result.stderr == "simulated NPU: no copies\n"


def submission(kind: str, start: float, end: float, **fields: object) -> dict[str, object]:
    cpu = {"cpu_start": start, "cpu_end": start, "own_cpu": 0.0}
    return {
        **{"kind": kind, "start": start, "end": end, "entries": 1, "bytes": 100},
        **{"npu": 0, "pid": 1, **cpu},
        **fields,
    }


class TestSummary:
    def test_busy_time_counts_overlapping_copies_once(self):
        report = _report.summarize(
            [submission("h2v", 0, 2), submission("h2v", 1, 3), submission("h2v", 5, 6)]
        )
        assert (report.kinds["h2v"].busy, report.busy) == (4, 4)
        assert report.kinds["h2v"].submissions == 3

    def test_both_directions(self):
        report = _report.summarize(
            [submission("h2v", 0, 4), submission("v2h", 3, 5), submission("v2h", 8, 9)]
        )
        assert (report.both, report.shorter, report.busy) == (1, 3, 6)

    def test_npus_are_separate(self):
        report = _report.summarize([submission("h2v", 0, 4), submission("v2h", 0, 4, npu=1)])
        assert (report.both, report.busy) == (0, 8)

    def test_host_work_is_what_the_copies_did_not_do(self):
        report = _report.summarize(
            [
                submission("h2v", 0, 4, cpu_start=0, cpu_end=3, own_cpu=0.5),
                submission("v2h", 1, 5, cpu_start=1, cpu_end=4, own_cpu=0.25),
            ]
        )
        assert report.host == 3.25

    def test_a_torn_last_line_is_left_out(self, tmp_path):
        path = tmp_path / "trace"
        path.write_text(json.dumps({"a": 1}) + "\n" + '{"a": ')
        assert _report.read_trace(path) == [{"a": 1}]


@pytest.mark.parametrize("options", [(), ("--report",)])
def test_a_command_that_cannot_be_run(options, simulate, tmp_path):
    script = tmp_path / "script"
    script.write_text("no program\n")
    script.chmod(0o755)
    result = simulate(*options, "--", str(script))
    assert result.returncode == 126
    assert f"{script} cannot be run: Exec format error" in result.stderr
