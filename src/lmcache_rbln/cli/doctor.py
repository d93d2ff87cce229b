# SPDX-License-Identifier: Apache-2.0
"""``lmcache-rbln doctor``: what is wrong with this host, and what to do about it.

Each line is a check: ok, warning or failed, what was found, and the next step. torch is never
imported here, for a broken RBLN runtime makes that impossible: a process of its own looks at it.
No NPU is opened unless ``--open`` is given.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.text import Text

from lmcache_rbln import __version__
from lmcache_rbln.cli import _doctor_host, _doctor_server
from lmcache_rbln.cli._doctor_report import Check, Status, failed

#: Seconds after which a probe that uses no processor time is taken to hang; a host that is merely
#: busy still gives it some.
_SILENT_SECONDS = 20.0
#: Seconds for the probe in any case.
_PROBE_SECONDS = 300.0

_COLOURS = {Status.OK: "green", Status.WARNING: "yellow", Status.FAILED: "bold red"}

#: Distributions whose versions the report names.
_DISTRIBUTIONS = (
    "lmcache-rbln",
    "lmcache",
    "torch",
    "torch-rbln",
    "rebel-compiler",
    "vllm",
    "vllm-rbln",
)


def add_parser(subparsers: Any) -> None:
    """Add the command to ``lmcache-rbln``."""
    parser = subparsers.add_parser(
        "doctor",
        help="check this host, and a running server, for everything that serving needs",
        description=__doc__,
        epilog="Exit code: 0 if serving would work (warnings allowed), 1 if not, 2 for a wrong "
        "argument.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--server", metavar="URL", default="", help="check this lmcache server, tcp://HOST:PORT"
    )
    parser.add_argument(
        "--http",
        metavar="URL",
        default="",
        help="its HTTP pages (default: port 8080 on the same host)",
    )
    parser.add_argument(
        "--block-size",
        metavar="N",
        type=int,
        help="check the server's chunk size against vLLM's --block-size N",
    )
    parser.add_argument(
        "--no-engine",
        action="store_true",
        help="this host needs no vLLM: a server, or the demo, runs here",
    )
    parser.add_argument(
        "--open", action="store_true", help="use each NPU once, which fails if one is held"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Run all checks and print the report.

    Returns:
        0 if no check failed, else 1.
    """
    started = time.monotonic()
    if args.block_size is not None and args.block_size < 1:
        args.parser.error(f"--block-size {args.block_size}: expected at least 1")
    if args.block_size is not None and not (args.server or args.http):
        args.parser.error(
            f"--block-size {args.block_size} is checked against a server's chunk size: give "
            "--server too"
        )
    try:
        for address, port in (
            (args.server, _doctor_server.DEFAULT_PORT),
            (args.http, _doctor_server.DEFAULT_HTTP_PORT),
        ):
            if address:
                _doctor_server.parse_address(address, port)
    except ValueError as exc:
        args.parser.error(str(exc))
    diagnosis = diagnose(
        server=args.server,
        http_address=args.http,
        block_size=args.block_size,
        engine=not args.no_engine,
        open_npus=args.open,
    )
    seconds = time.monotonic() - started
    if args.json:
        print(json.dumps(_report(diagnosis, seconds), indent=2))
    else:
        _show(Console(), diagnosis)
    return 0 if diagnosis.good else 1


@dataclass(frozen=True)
class Diagnosis:
    """The outcome of all checks.

    Attributes:
        checks: in the order of the report.
        simulated: whether the RBLN runtime of this environment is the simulated one.
    """

    checks: tuple[Check, ...]
    simulated: bool

    @property
    def good(self) -> bool:
        """Whether no check failed."""
        return not any(check.status is Status.FAILED for check in self.checks)


def diagnose(
    *,
    server: str = "",
    http_address: str = "",
    block_size: int | None = None,
    engine: bool = True,
    open_npus: bool = False,
) -> Diagnosis:
    """Run all checks.

    Args:
        server: address of an LMCache server to look at, ``tcp://HOST:PORT``; "" for none.
        http_address: address of its HTTP pages; "" for port 8080 on the same host.
        block_size: tokens a block of the engine; None if not known.
        engine: whether vLLM is to run on this host.
        open_npus: whether each NPU is used once.

    Raises:
        ValueError: an address is none.
    """
    seen = _doctor_server.look(server, http_address) if server or http_address else None
    facts, ended = _Probe(open_npus=open_npus, server=seen).finish()
    checks = list(_doctor_host.software(facts, engine=engine))
    if ended:
        checks.insert(1, ended)
    if seen is not None:
        checks += _doctor_server.checks(seen, facts, block_size)
    checks.append(_doctor_host.memlock(seen.pool_nbytes if seen is not None else None))
    return Diagnosis(tuple(checks), bool(facts.get("runtime", {}).get("simulated")))


class _Probe:
    """The process that imports torch and LMCache; see ``_doctor_probe``."""

    def __init__(self, *, open_npus: bool, server: _doctor_server.Server | None) -> None:
        command = [sys.executable, "-m", "lmcache_rbln.cli._doctor_probe"]
        command += ["--open"] if open_npus else []
        if server is not None and not server.unreachable:
            command += ["--server", server.url]
            command += ["--mode"] if server.pages_missing else []
        environment = {
            **os.environ,
            # The probe loads torch-rbln itself, after torch.
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            # LMCache would report the device's properties to its makers.
            "LMCACHE_TRACK_USAGE": "false",
        }
        self._log: IO[str] = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def finish(self) -> tuple[dict[str, dict[str, Any]], Check | None]:
        """What the probe found by stage, and a failed check if it ended before its end."""
        output, hung = self._wait()
        facts: dict[str, dict[str, Any]] = {}
        stage = "start"
        for line in output.splitlines():
            entry = json.loads(line)
            stage = entry.get("begin", stage)
            if "end" in entry:
                facts[entry["end"]] = entry["facts"]
        with self._log as log:
            log.seek(0)
            last = next((line for line in reversed(log.read().splitlines()) if line.strip()), "")
        if not hung and self._process.returncode == 0:
            return facts, None
        how = "hung" if hung else f"ended with exit code {self._process.returncode}"
        return facts, failed(
            "probe",
            f"the process that looks at torch, the runtime and LMCache {how} at {stage}: {last}",
            f"see what happens there: TORCH_DEVICE_BACKEND_AUTOLOAD=0 {sys.executable} -m "
            "lmcache_rbln.cli._doctor_probe",
        )

    def _wait(self) -> tuple[str, bool]:
        """What the probe has printed, and whether it had to be ended."""
        used, since = -1.0, time.monotonic()
        end = since + _PROBE_SECONDS
        while True:
            try:
                return self._process.communicate(timeout=1.0)[0], False
            except subprocess.TimeoutExpired:
                now, using = time.monotonic(), _processor_seconds(self._process.pid)
                if using != used:
                    used, since = using, now
                if now - since > _SILENT_SECONDS or now > end:
                    self._process.kill()
                    return self._process.communicate()[0], True


def _processor_seconds(pid: int) -> float:
    """Processor time that a process has used, its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _report(diagnosis: Diagnosis, seconds: float) -> dict[str, Any]:
    return {
        "ok": diagnosis.good,
        "simulated": diagnosis.simulated,
        "seconds": round(seconds, 2),
        "versions": {name: _doctor_host.installed(name) or None for name in _DISTRIBUTIONS},
        "checks": [{**asdict(check), "status": check.status.value} for check in diagnosis.checks],
    }


def _show(console: Console, diagnosis: Diagnosis) -> None:
    checks = diagnosis.checks
    console.print(f"lmcache-rbln {__version__} doctor", highlight=False)
    width = max(len(check.name) for check in checks)
    for check in checks:
        line = Text.assemble(
            (f"{check.status.value:<8}", _COLOURS[check.status]),
            f"{check.name:<{width}}  ",
            check.found,
        )
        # A long line is the terminal's to fold: what is copied from it stays whole.
        console.print(line, soft_wrap=True, highlight=False)
        if check.status is not Status.OK:
            console.print(
                Text(f"{'':<8}{'':<{width}}  -> {check.next_step}"), soft_wrap=True, highlight=False
            )
    counts = {status: sum(check.status is status for check in checks) for status in Status}
    summary = f"{counts[Status.FAILED]} failed, {counts[Status.WARNING]} warnings. "
    summary += "Serving would work" if diagnosis.good else "Serving would not work"
    summary += ", on simulated NPUs." if diagnosis.simulated else "."
    console.print(Text(summary, "bold green" if diagnosis.good else "bold red"))
