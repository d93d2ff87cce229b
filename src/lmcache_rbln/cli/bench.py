# SPDX-License-Identifier: Apache-2.0
"""``lmcache-rbln bench``: how fast KV blocks move between NPU and host, and against what.

Without an NPU the simulated one is measured: a link with modelled costs, which moves no bytes (a
real one takes no CPU either), beside the host's real work.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lmcache_rbln import simulator
from lmcache_rbln.cli import _bench_peer, _bench_plot
from lmcache_rbln.cli._bench_models import MODELS, Model, Row, row_of
from lmcache_rbln.cli._devices import find_devices
from lmcache_rbln.cli._files import unwritable, write_report
from lmcache_rbln.lmcache_compat.server_process import (
    LMCacheServer,
    ServerFailed,
    terminate_as_exit,
)

DIRECTIONS = ("store", "retrieve")

#: Modelled costs of the simulated link, besides its speed: device-to-device GB/s, microseconds a
#: submission and a bulk entry.
_COSTS: dict[str, float] = {"d2d_gbps": 200, "submit_us": 30, "entry_us": 2}
_LINK_GBPS = 8.0

_LLAMA = MODELS["llama-3.1-8b"]
_DEEPSEEK = MODELS["deepseek-v3"]


@dataclass(frozen=True)
class Gate:
    """What a row must reach, and what is aimed at, in both directions.

    Attributes:
        row: The row.
        ratio: Times the pre-release; what it must be, what is aimed at.
        ideal: The fraction of the ideal, likewise.
    """

    row: Row
    ratio: tuple[float, float]
    ideal: tuple[float, float]


#: At 8 GB/s each way.
GATES = (
    Gate(row_of("blocks_first", _LLAMA, 1024, 1, False), (1.6, 1.75), (0.83, 0.90)),
    Gate(row_of("kv_first", _LLAMA, 1024, 1, False), (1.6, 1.75), (0.83, 0.90)),
    Gate(row_of("blocks_first", _LLAMA, 128, 8, False), (1.55, 1.7), (0.78, 0.88)),
    Gate(row_of("blocks_first", _LLAMA, 16, 16, True), (2.2, 2.6), (0.55, 0.65)),
    Gate(row_of("mla", _DEEPSEEK, 1024, 1, False), (1.05, 1.12), (0.90, 0.95)),
    Gate(row_of("mla", _DEEPSEEK, 128, 8, False), (1.05, 1.12), (0.90, 0.95)),
)

#: Fastest of so many samples, at least, where gates apply; a row that misses its gate gets as many
#: again, so often, for both sides: a second in which the host did something else is no figure.
_GATE_SAMPLES = 15
_GATE_ATTEMPTS = 3
#: Nothing may be slower than the pre-release on a faster link either.
_FASTER_LINK_GBPS = 14.0

#: Through a server: fresh stores, times those without the pin_memory hook; warm stores and
#: retrieves, of what the device operation reaches alone.
_FRESH_GATE = 3.0
_WARM_GATE = 0.7

#: End to end: 256 MiB in eight chunks of 256 tokens, and a pool for some of them.
_END_TO_END_ROW = row_of("blocks_first", _LLAMA, 128, 2, False)
_FRESH_STORES = 3
_WARM_ROUNDS = 5
_POOL_GB = 1.25

#: Of one transfer: what a simulated NPU of 16 GiB, and a host, have room for many times over.
_MAX_BLOCKS = 1 << 17
_MAX_MIB = 2048
_MAX_LAYERS = 1024

_PLOTS = (".png", ".svg", ".pdf")

#: Columns of a table that goes to a file.
_WIDTH = 180


class BenchFailed(RuntimeError):  # noqa: N818
    """Nothing could be measured; the text says why."""


@dataclass(frozen=True)
class Bench:
    """Where to measure, and on whose behalf.

    Attributes:
        console: For progress.
        environment: Of the measuring processes, less the simulated link's costs.
        simulated: Whether they see the simulated NPU.
        bundled: Whether to measure the installed LMCache's own backend.
        peer: The pre-release's kernels, or "".
    """

    console: Console
    environment: dict[str, str]
    simulated: bool
    bundled: bool
    peer: str

    def on_link(self, gbps: float, *, copy: bool = False) -> dict[str, str]:
        """Environment of a measuring process; on an NPU, the link is what it is."""
        environment = {**self.environment, "LMCACHE_TRACK_USAGE": "false"}
        environment["LMCACHE_LOG_LEVEL"] = "ERROR"
        if not self.simulated:
            return environment
        # In timing mode no byte arrives, which the package's own check would find.
        if not copy:
            environment["LMCACHE_RBLN_SELF_CHECK"] = "0"
        costs = dict.fromkeys(_COSTS, 0.0) if copy else _COSTS
        return simulator.environment(
            environment, npus=1, host=simulator.unique_host("bench"), copy=copy,
            link_gbps=0 if copy else gbps, **costs,
        )  # fmt: skip


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to ``lmcache-rbln``."""
    parser = subparsers.add_parser(
        "bench",
        help="measure transfers between NPU and host, alone and through a server",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("geometry")
    what.add_argument("--model", choices=sorted(MODELS), default="llama-3.1-8b", metavar="NAME",
                      help=f"one of {', '.join(sorted(MODELS))} (llama-3.1-8b)")  # fmt: skip
    what.add_argument("--tensor-parallel", type=_positive, default=1, metavar="N",
                      help="workers that the KV heads are divided among (1)")  # fmt: skip
    what.add_argument("--layers", type=_positive, metavar="N", help="instead of the model's")
    what.add_argument("--heads", type=_positive, metavar="N", help="KV heads, likewise")
    what.add_argument("--head-size", type=_positive, metavar="N", help="likewise")
    what.add_argument("--mla-width", type=_positive, metavar="N",
                      help="MLA with so many elements a token, likewise")  # fmt: skip
    what.add_argument("--layout", type=_names("blocks_first", "kv_first"), metavar="NAMES",
                      default=("blocks_first", "kv_first"),
                      help="of a model that is not MLA: blocks_first,kv_first (both)")  # fmt: skip
    what.add_argument("--block-size", type=_positives, default=(16, 128, 1024), metavar="N,...",
                      help="tokens a block (16,128,1024)")  # fmt: skip
    what.add_argument("--blocks-per-chunk", type=_positive, metavar="N",
                      help="(as many as make 256 tokens, or one)")  # fmt: skip
    what.add_argument("--scattered", action="store_true", help="random block ids, not consecutive")
    what.add_argument("--dtype", default="bfloat16", choices=sorted(_ITEMSIZES), metavar="NAME",
                      help=f"one of {', '.join(sorted(_ITEMSIZES))} (bfloat16)")  # fmt: skip
    what.add_argument("--mib", type=_positive, default=256, metavar="N",
                      help="MiB a transfer, roughly (256)")  # fmt: skip
    how = parser.add_argument_group("measuring")
    how.add_argument("--samples", type=_positive, default=11, metavar="N",
                     help="the fastest of so many counts (11)")  # fmt: skip
    how.add_argument("--peer", action="store_true",
                     help=f"also measure the backend in {_bench_peer.REQUIREMENT}, "
                     "which is downloaded once")  # fmt: skip
    how.add_argument("--link-gbps", type=_speed, default=_LINK_GBPS, metavar="GBPS",
                     help="of the simulated link, in each direction (8)")  # fmt: skip
    how.add_argument("--end-to-end", action="store_true",
                     help="measure through a real server instead")  # fmt: skip
    how.add_argument("--accept", action="store_true",
                     help="measure what this package promises, and fail where it does not hold")  # fmt: skip
    output = parser.add_argument_group("output")
    output.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    output.add_argument("--plot", type=Path, metavar="FILE.png",
                        help="draw bandwidth by block size; needs matplotlib")  # fmt: skip
    parser.set_defaults(run=run, parser=parser)


_ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1, "uint8": 1}


def run(args: argparse.Namespace) -> int:
    """Run the benchmark.

    Returns:
        0 if all was measured and, with ``--accept``, holds; 1 if not; 2 for unusable arguments.
    """
    # Tables of eight columns: where there is no terminal whose width counts, they get theirs.
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    for name in ("json", "plot"):
        path = getattr(args, name)
        if path is not None and (problem := unwritable(path)):
            console.print(f"--{name}: {problem}", markup=False)
            return 2
    if args.plot and args.plot.suffix not in _PLOTS:
        console.print(
            f"--plot: {args.plot} is no picture; expected a name with {' or '.join(_PLOTS)}",
            markup=False,
        )
        return 2
    if args.plot and not _bench_plot.available():
        console.print("--plot needs matplotlib: pip install matplotlib", markup=False)
        return 2
    if ignored := _without_effect(args):
        console.print(
            f"{', '.join(ignored)}: without effect where --accept or --end-to-end fixes what is "
            "measured; leave them out",
            markup=False,
        )
        return 2
    try:
        rows = _rows(args)
    except ValueError as error:
        console.print(str(error), markup=False)
        return 2
    try:
        with terminate_as_exit():
            return _run(args, rows, console)
    except (
        BenchFailed, ServerFailed, simulator.SimulatorError, _bench_peer.PeerNotFound, ValueError,
    ) as error:  # fmt: skip
        console.print(str(error), style="red", markup=False)
        return 1


def _run(args: argparse.Namespace, rows: Sequence[Row], console: Console) -> int:
    devices = find_devices()
    bench = Bench(
        console,
        devices.server_environment,
        devices.name != "NPU",
        bundled=not args.accept,
        peer=str(_bench_peer.kernels()) if args.peer or args.accept else "",
    )
    if args.accept and not bench.simulated:
        raise BenchFailed("--accept is about the simulated link; on an NPU, measure without it")
    _say_what_is_measured(bench, args.link_gbps)
    failures: list[str] = []
    report: dict[str, Any] = {"simulated": bench.simulated}
    if args.accept:
        report["accept"] = _accept(bench, failures)
    if args.end_to_end or args.accept:
        failed: list[str] = failures if args.accept else []
        report["end_to_end"] = _end_to_end(bench, args.link_gbps, failed)
    else:
        report |= _measure(bench, rows, args.samples, args.link_gbps, "measuring")
        console.print(_table(report["results"], report["link_gbps"]))
        if args.plot:
            title = f"{args.model}, {report['about']['device']}, {os.cpu_count()} CPUs"
            _bench_plot.draw(args.plot, report["results"], report["link_gbps"], title)
    if args.json and (problem := write_report(args.json, report)):
        failures.append(f"--json: {problem}")
    for failure in failures:
        console.print(f"✗ {failure}", style="red", markup=False)
    if args.accept and not failures:
        console.print("✓ everything holds", style="green")
    return 1 if failures else 0


def _without_effect(args: argparse.Namespace) -> list[str]:
    """Options that were given, and that the kind of measurement does not heed."""
    if not (args.accept or args.end_to_end):
        return []
    unheeded = [
        *("model", "tensor_parallel", "layers", "heads", "head_size", "mla_width", "layout"),
        *("block_size", "blocks_per_chunk", "scattered", "dtype", "mib", "samples", "plot"),
        "link_gbps" if args.accept else "peer",
    ]
    return [
        f"--{name.replace('_', '-')}"
        for name in unheeded
        if getattr(args, name) != args.parser.get_default(name)
    ]


def _rows(args: argparse.Namespace) -> list[Row]:
    model = MODELS[args.model]
    if args.mla_width:
        if args.heads or args.head_size:
            raise ValueError("--mla-width: MLA has neither --heads nor --head-size")
        model = Model(args.layers or model.layers, 1, args.mla_width, mla=True)
    elif args.heads or args.head_size or args.layers:
        if model.mla and (args.heads or args.head_size):
            raise ValueError(f"--heads, --head-size: {args.model} is MLA; expected --mla-width")
        model = Model(
            args.layers or model.layers, args.heads or model.heads,
            args.head_size or model.head_size, model.mla,
        )  # fmt: skip
    model = model.on_one_of(args.tensor_parallel)
    rows = [
        row_of(
            layout, model, size, args.blocks_per_chunk or max(1, 256 // size),
            args.scattered, args.dtype, _ITEMSIZES[args.dtype], args.mib,
        )
        for layout in (("mla",) if model.mla else args.layout)
        for size in args.block_size
    ]  # fmt: skip
    if model.layers > _MAX_LAYERS or model.heads > _MAX_LAYERS:
        raise ValueError(
            f"{model.layers} layers of {model.heads} KV heads; expected at most {_MAX_LAYERS} of each"
        )
    for row in rows:
        nbytes = row.token_nbytes(_ITEMSIZES[args.dtype]) * row.blocks * row.block_size
        if row.blocks > _MAX_BLOCKS or nbytes > _MAX_MIB << 20:
            raise ValueError(
                f"{row.title}: {row.chunks} chunks, {row.blocks} blocks, {nbytes >> 20} MiB a "
                f"transfer; expected at most {_MAX_BLOCKS} blocks and {_MAX_MIB} MiB: change --mib, "
                "--block-size or --blocks-per-chunk"
            )
    return rows


def _say_what_is_measured(bench: Bench, link_gbps: float) -> None:
    if not bench.simulated:
        bench.console.print("Measured on an [bold]NPU[/].")
        return
    bench.console.print(
        f"Measured on a [bold]simulated NPU[/]: modelled are a link of {link_gbps:g} GB/s each way, "
        f"{_COSTS['d2d_gbps']:g} GB/s within the NPU, {_COSTS['submit_us']:g} µs a submission, "
        f"{_COSTS['entry_us']:g} µs an entry of a bulk copy. The host's work is real. "
        f"{len(os.sched_getaffinity(0))} CPUs, load {os.getloadavg()[0]:.1f}."
    )


def _measure(
    bench: Bench, rows: Sequence[Row], samples: int, link_gbps: float, title: str
) -> dict[str, Any]:
    """Measure rows on one link: ``about``, ``link_gbps`` by direction, ``results``."""
    what = "rows" if bench.simulated else "link"
    found = _ask(
        bench.on_link(link_gbps),
        {
            "what": what, "rows": [asdict(row) for row in rows], "samples": samples,
            "bundled": bench.bundled, "peer": bench.peer,
        },
        _Bar(bench.console, title, len(rows) * samples * len(DIRECTIONS)),
    )  # fmt: skip
    about = found.pop(0)
    link = dict.fromkeys(DIRECTIONS, link_gbps) if bench.simulated else found.pop(0)
    results = []
    for row, result in zip(rows, found, strict=True):
        result["row"] = asdict(row)
        result["title"] = row.title
        result["ideal_s"] = {
            way: max(result["nbytes"] / link[way] / 1e9, result["transpose_s"][way])
            for way in DIRECTIONS
        }
        results.append(result)
    return {"about": about, "link_gbps": link, "results": results}


class _Bar:
    """A progress bar, as a context manager."""

    def __init__(self, console: Console, title: str, total: int | None) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=console, transient=True,
        )  # fmt: skip
        self._task = self._progress.add_task(title, total=total)

    def __enter__(self) -> Callable[[str], None]:
        self._progress.start()
        return self._step

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def _step(self, text: str) -> None:
        self._progress.advance(self._task)
        if text:
            self._progress.update(self._task, description=text)


def _ask(environment: dict[str, str], request: dict[str, Any], bar: _Bar) -> list[Any]:
    """Have a process of its own measure something; its results.

    Raises:
        BenchFailed: The process failed; with the end of what it said.
    """
    results = []
    read, write = os.pipe()
    with tempfile.TemporaryFile() as log, os.fdopen(read) as answers, bar as step:
        process = subprocess.Popen(
            [sys.executable, "-m", "lmcache_rbln.cli._bench_measure", str(write)],
            env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=(write,),
        )  # fmt: skip
        os.close(write)
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps(request).encode())
            process.stdin.close()
            for line in answers:
                answer = json.loads(line)
                if "error" in answer:
                    raise BenchFailed(f"the measuring process failed:\n{answer['error']}")
                if "step" in answer:
                    step(answer["step"])
                else:
                    results.append(answer["result"])
            code = process.wait()
        finally:
            process.kill()
            process.wait()
        if code:
            log.seek(max(0, log.tell() - 4000))
            raise BenchFailed(
                f"the measuring process ended with exit code {code}; its output ends:\n"
                + log.read().decode(errors="replace")
            )
    return results


def _gbps(result: dict[str, Any], name: str, direction: str) -> float:
    return float(result["nbytes"] / result["ways"][name][direction]["seconds"] / 1e9)


def _ratio(result: dict[str, Any], name: str, direction: str) -> float:
    ways = result["ways"]
    return float(ways[name][direction]["seconds"] / ways["ours"][direction]["seconds"])


def _of_ideal(result: dict[str, Any], direction: str) -> float:
    return float(result["ideal_s"][direction] / result["ways"]["ours"][direction]["seconds"])


def _table(
    results: Sequence[dict[str, Any]], link: dict[str, float], gates: Sequence[Gate] = ()
) -> Table:
    others = [
        name
        for name in ("bundled", "pre-release")
        if any(name in result["ways"] for result in results)
    ]
    table = Table(
        title=f"link: {link['store']:.1f} GB/s out of the NPU, {link['retrieve']:.1f} into it"
    )
    table.add_column("row")
    table.add_column("direction")
    for header in (
        "GB/s", "submissions", "MiB extra",
        *(f"{name}: GB/s, submissions, MiB extra" for name in others),
        *(f"times {name}" for name in others), "of the ideal",
    ):  # fmt: skip
        table.add_column(header, justify="right")
    for index, result in enumerate(results):
        gate = gates[index] if gates else None
        for direction in DIRECTIONS:
            cells = [result["title"] if direction == "store" else "", direction]
            cells += _figures(result, "ours", direction)
            cells += [
                "  ".join(_figures(result, name, direction)) if name in result["ways"] else "-"
                for name in others
            ]
            for name in others:
                if name not in result["ways"]:
                    cells.append("-")
                    continue
                wanted = gate.ratio if gate and name == "pre-release" else None
                cells.append(_against(_ratio(result, name, direction), wanted))
            cells.append(_against(_of_ideal(result, direction), gate.ideal if gate else None))
            table.add_row(*cells, end_section=direction == "retrieve")
    return table


def _figures(result: dict[str, Any], name: str, direction: str) -> list[str]:
    way = result["ways"][name]
    counted = way[direction]["submissions"]
    return [
        f"{_gbps(result, name, direction):.2f}",
        "-" if counted is None else str(counted),
        f"{way['extra_bytes'] / 2**20:.0f}",
    ]


def _reachable(gate: Gate, result: dict[str, Any], direction: str) -> float:
    """Times the pre-release that the row would be at the fraction of the ideal that is aimed at.

    The faster the host transposes, the nearer the pre-release is to the link by itself.
    """
    theirs = result["ways"]["pre-release"][direction]["seconds"]
    return float(gate.ideal[1] * theirs / result["ideal_s"][direction])


def _against(value: float, wanted: tuple[float, float] | None) -> str:
    """A figure, with what it must be and what is aimed at."""
    if wanted is None:
        return f"{value:.2f}"
    gate, target = wanted
    colour = "red" if value < gate else "green" if value >= target else "yellow"
    return f"[{colour}]{value:.2f}[/] ({gate:g}/{target:g})"


def _accept(bench: Bench, failures: list[str]) -> dict[str, Any]:
    rows = [gate.row for gate in GATES]
    request = {
        "what": "check", "rows": [asdict(row) for row in rows], "bundled": False,
        "peer": bench.peer,
    }  # fmt: skip
    found = _ask(
        bench.on_link(0, copy=True), request, _Bar(bench.console, "comparing every byte", None)
    )
    for problems in found[1:]:
        failures += problems
    report: dict[str, Any] = {"exact": not failures}
    report["link_8"] = slow = _measure_gated(bench, _LINK_GBPS, _missed)
    bench.console.print(_table(slow["results"], slow["link_gbps"], GATES))
    for gate, result in zip(GATES, slow["results"], strict=True):
        failures += _missed(gate, result)
        for direction in DIRECTIONS:
            ratio = _ratio(result, "pre-release", direction)
            reachable = _reachable(gate, result, direction)
            if reachable <= ratio < gate.ratio[0]:
                theirs = _gbps(result, "pre-release", direction)
                needed = gate.ratio[0] / ratio * _of_ideal(result, direction)
                bench.console.print(
                    f"{gate.row.title}, {direction}: {ratio:.2f} times the pre-release, gate "
                    f"{gate.ratio[0]:g}. The pre-release reaches {theirs:.2f} GB/s on this host, so "
                    f"that the gate would take {needed:.2f} of the ideal; held to the "
                    f"{gate.ideal[1]:g} aimed at, which is {reachable:.2f} times.",
                    style="yellow", markup=False, highlight=False,
                )  # fmt: skip
    report["link_14"] = fast = _measure_gated(bench, _FASTER_LINK_GBPS, _missed_on_faster_link)
    bench.console.print(_table(fast["results"], fast["link_gbps"]))
    for gate, result in zip(GATES, fast["results"], strict=True):
        failures += _missed_on_faster_link(gate, result)
    return report


def _measure_gated(
    bench: Bench, link_gbps: float, missed: Callable[[Gate, dict[str, Any]], list[str]]
) -> dict[str, Any]:
    """Measure the rows that have gates, and those that missed theirs once more."""
    found = _measure(
        bench, [gate.row for gate in GATES], _GATE_SAMPLES, link_gbps, f"{link_gbps:g} GB/s"
    )
    pairs = list(zip(GATES, found["results"], strict=True))
    for _ in range(_GATE_ATTEMPTS - 1):
        again = []
        for gate, result in pairs:
            if texts := missed(gate, result):
                again.append((gate, result))
            for text in texts:
                bench.console.print(f"measured again: {text}", style="yellow", markup=False)
        if not again:
            break
        rows = [gate.row for gate, _ in again]
        more = _measure(bench, rows, _GATE_SAMPLES, link_gbps, f"{link_gbps:g} GB/s, again")
        for (_, result), another in zip(again, more["results"], strict=True):
            _take_fastest(result, another)
    return found


def _take_fastest(result: dict[str, Any], another: dict[str, Any]) -> None:
    """Of two measurements of a row, the fastest of each side."""
    for direction in DIRECTIONS:
        for key in ("ideal_s", "transpose_s"):
            times = result[key]
            times[direction] = min(times[direction], another[key][direction])
        for name, way in result["ways"].items():
            times, more = way[direction], another["ways"][name][direction]
            times["seconds"] = min(times["seconds"], more["seconds"])


def _missed(gate: Gate, result: dict[str, Any]) -> list[str]:
    """What a row does not reach."""
    found = []
    for direction in DIRECTIONS:
        where = f"{gate.row.title}, {direction}"
        ratio = _ratio(result, "pre-release", direction)
        if ratio < min(gate.ratio[0], _reachable(gate, result, direction)):
            found.append(f"{where}: {ratio:.2f} times the pre-release, gate {gate.ratio[0]}")
        ideal = _of_ideal(result, direction)
        if ideal < gate.ideal[0]:
            found.append(f"{where}: {ideal:.2f} of the ideal, gate {gate.ideal[0]}")
    return found


def _missed_on_faster_link(gate: Gate, result: dict[str, Any]) -> list[str]:
    """Where a row is slower than the pre-release."""
    return [
        f"{gate.row.title}, {direction}, at {_FASTER_LINK_GBPS:g} GB/s: slower than the "
        f"pre-release, {ratio:.2f} times"
        for direction in DIRECTIONS
        if (ratio := _ratio(result, "pre-release", direction)) < 1
    ]


#: Server, whether over shared memory, and whether the hook faults its pool in.
_SERVERS = (
    ("shared memory", True, True),
    ("shared memory, LMCACHE_RBLN_PREFAULT=0", True, False),
    ("pickle", False, True),
)


def _end_to_end(bench: Bench, link_gbps: float, failures: list[str]) -> dict[str, Any]:
    measured: dict[str, Any] = {}
    for name, shared, hook in _SERVERS:
        environment = bench.on_link(link_gbps)
        environment["LMCACHE_RBLN_PREFAULT"] = "1" if hook else "0"
        bar = _Bar(bench.console, f"{name}: starting a server", None)
        row = _END_TO_END_ROW
        with LMCacheServer(
            chunk_size=row.block_size * row.blocks_per_chunk, pool_gb=_POOL_GB,
            shared_memory=shared, environment=environment,
        ) as server:  # fmt: skip
            request = {
                "what": "end_to_end", "url": server.url, "row": asdict(row), "samples": 7,
                "fresh": _FRESH_STORES if shared else 1, "warm": _WARM_ROUNDS if shared else 1,
            }  # fmt: skip
            (measured[name],) = _ask(environment, request, bar)
    bench.console.print(_end_to_end_table(measured))
    with_hook, without, _ = (measured[name] for name, *_ in _SERVERS)
    times = without["fresh_store"] / with_hook["fresh_store"]
    bench.console.print(
        f"Fresh stores: {times:.1f} times those without the hook ({_FRESH_GATE:g})."
    )
    if times < _FRESH_GATE:
        failures.append(
            f"fresh stores: {times:.2f} times those without the hook, gate {_FRESH_GATE}"
        )
    for what, alone in (("warm_store", "alone_store"), ("retrieve", "alone_retrieve")):
        part = with_hook[alone] / with_hook[what]
        label = what.replace("_", " ")
        bench.console.print(
            f"A {label}: {part:.2f} of the device operation alone ({_WARM_GATE:g})."
        )
        if part < _WARM_GATE:
            failures.append(f"{label}: {part:.2f} of the device operation alone, gate {_WARM_GATE}")
    return measured


def _end_to_end_table(measured: dict[str, Any]) -> Table:
    table = Table(title=f"through a real server, GB/s: {_END_TO_END_ROW.title}, 256 MiB")
    columns = {
        "alone_store": "device store", "alone_retrieve": "device retrieve",
        "fresh_store": "fresh store", "warm_store": "warm store", "retrieve": "retrieve",
    }  # fmt: skip
    table.add_column("server")
    for header in columns.values():
        table.add_column(header, justify="right")
    table.add_column("faulted in after", justify="right")
    for name, result in measured.items():
        took = result["prefault_s"]
        table.add_row(
            name,
            *(f"{result['nbytes'] / result[key] / 1e9:.2f}" for key in columns),
            "-" if took is None else f"{took:.1f} s",
        )
    return table


def _speed(text: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        speed = math.nan
    if not 0.01 <= speed <= 1e6:
        raise argparse.ArgumentTypeError(f"{text!r}: expected GB/s, from 0.01 to 1000000")
    return speed


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number above 0")
    return int(text)


def _positives(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))


def _names(*known: str) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(part.strip() for part in text.split(","))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r}: expected {' or '.join(known)}")
        return names

    return parse
