# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.faults``: the whole matrix, its figures, and how to replay what went wrong."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TextIO

from lmcache_rbln import simulator


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the choice of blocks (default: 1)")
    parser.add_argument("--replay", metavar="CASE", help="only this case, as printed")
    parser.add_argument("--only", metavar="TEXT", default="", help="only cases that contain this")
    parser.add_argument("--part", metavar="I/N", default="0/1", help="the I-th of N parts, from 0")
    parser.add_argument("--log", type=Path, default=Path("faults.log"), help="of all that is noisy")
    options = parser.parse_args()
    report = quiet(options.log)
    os.environ["LMCACHE_TRACK_USAGE"] = "false"
    os.environ["PYTHONHASHSEED"] = "0"
    simulator.activate(npus=1, host=simulator.unique_host("faults"))
    from tests.faults import matrix

    os.environ.update(matrix.environment())
    tally = matrix.Tally()
    began = time.monotonic()
    part, parts = (int(number) for number in options.part.split("/"))
    if options.replay:
        chosen = [matrix.Case.parse(options.replay)]
        bases = [base for base in matrix.bases() if str(base) == options.replay.rpartition("/")[0]]
    else:
        chosen = []
        bases = [base for base in matrix.bases() if options.only in str(base)][part::parts]
    with matrix.Servers() as servers:
        for base in bases:
            bench = matrix.Bench(servers[base.transport], base, options.seed)
            calls = bench.calls()
            before, at = tally.cases, time.monotonic()
            for case in chosen or matrix.cases(base, calls):
                try:
                    bench.run(case, tally)
                except matrix.WrongError as error:
                    getattr(tally, error.kind).append(str(case))
                    print(f"  WRONG ({error.kind}) {case}: {error}", file=report)
                    print(
                        f"    python -m tests.faults --seed {options.seed} --replay '{case}'",
                        file=report,
                        flush=True,
                    )
                    bench.close()
                    bench = matrix.Bench(servers[base.transport], base, options.seed)
                    bench.calls()
            bench.close()
            made = ", ".join(f"{calls[kind]} {kind}" for kind in matrix.KINDS if calls.get(kind))
            print(
                f"{base}: {made}; {tally.cases - before} cases in {time.monotonic() - at:.1f} s",
                file=report,
                flush=True,
            )
    print(
        f"{tally}; {time.monotonic() - began:.0f} s; by fault: {dict(tally.by_action)}", file=report
    )
    report.flush()
    return 0 if tally.good else 1


def quiet(log: Path) -> TextIO:
    """Send what the runtime and LMCache print to a file; returns the real standard output."""
    report = os.fdopen(os.dup(1), "w")
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    return report


if __name__ == "__main__":
    sys.exit(main())
