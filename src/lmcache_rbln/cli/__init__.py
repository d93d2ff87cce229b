# SPDX-License-Identifier: Apache-2.0
"""The command ``lmcache-rbln``; one module a command."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence

from lmcache_rbln import __version__

#: Modules of this package, in the order that the help lists them. Each has
#: ``add_parser(subparsers)``, which sets the default ``run``: ``run(args) -> exit code``.
COMMANDS = ("doctor", "demo", "bench", "serve", "simulate")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments without the program's name; the process's own by default.

    Returns:
        The exit code: 0 only if the command did what it was asked for.
    """
    parser = argparse.ArgumentParser(
        prog="lmcache-rbln",
        description="LMCache on Rebellions NPUs, and a simulated NPU to try it on.",
    )
    parser.add_argument("--version", action="version", version=f"lmcache-rbln {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    try:
        for name in COMMANDS:
            importlib.import_module(f"{__name__}.{name}").add_parser(subparsers)
        for subparser in subparsers.choices.values():
            # Made of docstrings, whose markup is not for terminals.
            subparser.description = (subparser.description or "").replace("``", "")
        args = parser.parse_args(argv)
        return int(args.run(args))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
