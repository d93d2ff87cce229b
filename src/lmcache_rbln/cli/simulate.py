# SPDX-License-Identifier: Apache-2.0
"""``lmcache-rbln simulate``: runs a command with a simulated NPU as its RBLN runtime."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType

from rich.console import Console

from lmcache_rbln.simulator import SimulatorError, engine, environment
from lmcache_rbln.simulator._report import read_trace, render, summarize
from lmcache_rbln.simulator._settings import SETTINGS

_TRACE = "RBLN_SIM_TRACE"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command ``simulate``."""
    parser = subparsers.add_parser(
        "simulate",
        help="run a command with simulated NPUs",
        description="Runs COMMAND with simulated NPUs as its RBLN runtime. Every option sets the "
        "environment variable named in brackets, which can be set instead.",
        usage="lmcache-rbln simulate [options] -- COMMAND ...",
    )
    for setting in SETTINGS:
        parser.add_argument(
            f"--{setting.name.replace('_', '-')}",
            metavar=setting.metavar,
            help=f"{setting.help} [{setting.variable}]",
        )
    parser.add_argument(
        "--report",
        action="store_true",
        help="print a summary of the copies on stderr when COMMAND has ended",
    )
    parser.add_argument(
        "--engine",
        action="store_true",
        help="also put a stand-in for the vendor's compiler on the import path of Python, so that "
        "vLLM-RBLN's engine runs, on the CPU",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Runs COMMAND.

    Returns:
        Its exit code, or 128 plus the number of the signal that ended it; 2 when the simulated NPU
        cannot be set up, 126 when COMMAND cannot be run, 127 when it is not found.
    """
    command: list[str] = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        args.parser.error("no command given: lmcache-rbln simulate [options] -- COMMAND ...")
    try:
        variables = environment(**{s.name: getattr(args, s.name) for s in SETTINGS})
        if args.engine:
            variables.update(engine.environment(variables))
    except ValueError as error:
        args.parser.error(str(error))
    except (SimulatorError, engine.RealCompilerInstalledError) as error:
        print(f"lmcache-rbln simulate: {error}", file=sys.stderr)
        return 2
    program = shutil.which(command[0])
    if program is None:
        print(f"lmcache-rbln simulate: command not found: {command[0]}", file=sys.stderr)
        return 127
    if trace := variables.get(_TRACE):
        variables[_TRACE] = os.path.abspath(trace)  # COMMAND may change its folder
    if not args.report:
        sys.stdout.flush()
        try:
            os.execve(program, command, variables)
        except OSError as error:
            return _cannot_run(program, error)
    if trace:
        return _run_and_report(program, command, variables)
    with tempfile.TemporaryDirectory(prefix="lmcache-rbln-") as folder:
        variables[_TRACE] = str(Path(folder) / "trace.jsonl")
        return _run_and_report(program, command, variables)


def _cannot_run(program: str, error: OSError) -> int:
    print(f"lmcache-rbln simulate: {program} cannot be run: {error.strerror}", file=sys.stderr)
    return 126


def _run_and_report(program: str, command: list[str], variables: dict[str, str]) -> int:
    trace = Path(variables[_TRACE])
    before = trace.stat().st_size if trace.exists() else 0
    try:
        child = subprocess.Popen(command, executable=program, env=variables)
    except OSError as error:
        return _cannot_run(program, error)

    def forward(number: int, frame: FrameType | None) -> None:
        child.send_signal(number)

    # The terminal sends Ctrl-C to COMMAND as well; how it takes it is its own affair.
    before_run = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, forward),
        signal.SIGHUP: signal.signal(signal.SIGHUP, forward),
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
    }
    try:
        code = child.wait()
    finally:
        for number, handler in before_run.items():
            signal.signal(number, handler)
    console = Console(stderr=True)
    submissions = read_trace(trace, before) if trace.exists() else []
    for part in render(summarize(submissions)):
        console.print(part)
    return code if code >= 0 else 128 - code
