# SPDX-License-Identifier: Apache-2.0
"""``lmcache-rbln simulate``: runs a command with a simulated NPU as its RBLN runtime."""

from __future__ import annotations

import argparse
import os
import shutil
import sys

from lmcache_rbln.simulator import SimulatorError, environment
from lmcache_rbln.simulator._settings import SETTINGS


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
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Becomes COMMAND; returns only where that fails (exit code 2, or 127 if not found)."""
    command: list[str] = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        args.parser.error("no command given: lmcache-rbln simulate [options] -- COMMAND ...")
    try:
        variables = environment(**{s.name: getattr(args, s.name) for s in SETTINGS})
    except ValueError as error:
        args.parser.error(str(error))
    except SimulatorError as error:
        print(f"lmcache-rbln simulate: {error}", file=sys.stderr)
        return 2
    program = shutil.which(command[0])
    if program is None:
        print(f"lmcache-rbln simulate: command not found: {command[0]}", file=sys.stderr)
        return 127
    os.execve(program, command, variables)
