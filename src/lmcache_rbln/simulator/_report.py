# SPDX-License-Identifier: Apache-2.0
"""Reads a trace of the simulated NPUs and says what they were busy with."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

#: Kinds of copies, in the order of the table.
KINDS = {"h2v": "host to device", "v2h": "device to host", "v2v": "within a device"}

Interval = tuple[float, float]


@dataclass
class Kind:
    """Totals of one kind of copy; ``busy`` is the time in which at least one was under way, s."""

    submissions: int = 0
    entries: int = 0
    bytes: int = 0
    busy: float = 0.0

    @property
    def gbps(self) -> float:
        """Bandwidth while busy, GB/s; 0 when never busy."""
        return self.bytes / self.busy / 1e9 if self.busy else 0.0


@dataclass
class Report:
    """Summary of a trace; times in seconds.

    Attributes:
        kinds: Totals by kind of copy.
        both: Time in which copies ran in both directions of the host link at once.
        shorter: Busy time of the less busy direction: the most that ``both`` could be.
        busy: Time in which any copy was under way.
        host: CPU time that the processes spent on other things meanwhile.
        processes: How many processes copied.
    """

    kinds: dict[str, Kind] = field(default_factory=dict)
    both: float = 0.0
    shorter: float = 0.0
    busy: float = 0.0
    host: float = 0.0
    processes: int = 0


def read_trace(path: Path, offset: int = 0) -> list[dict[str, Any]]:
    """The submissions in a trace file, from a byte offset on; a torn last line is left out."""
    with open(path, "rb") as file:
        file.seek(offset)
        lines = file.read().split(b"\n")[:-1]
    return [json.loads(line) for line in lines]


def summarize(submissions: Sequence[dict[str, Any]]) -> Report:
    """What a trace amounts to.

    Each NPU's link is taken by itself and the times are added up, so that two NPUs that copy at
    once count as busy twice.
    """
    report = Report(kinds={kind: Kind() for kind in KINDS})
    by_npu: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for entry in submissions:
        kind = report.kinds[entry["kind"]]
        kind.submissions += 1
        kind.entries += entry["entries"]
        kind.bytes += entry["bytes"]
        by_npu[entry["pid"], entry["npu"]].append(entry)
    for entries in by_npu.values():
        spans = {name: _union(_spans(entries, name)) for name in KINDS}
        for name, intervals in spans.items():
            report.kinds[name].busy += _length(intervals)
        report.both += _length(_intersection(spans["h2v"], spans["v2h"]))
        report.shorter += min(_length(spans["h2v"]), _length(spans["v2h"]))
        report.busy += _length(_union(span for each in spans.values() for span in each))
    by_process: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for entry in submissions:
        by_process[entry["pid"]].append(entry)
    report.processes = len(by_process)
    report.host = sum(_host_cpu(entries) for entries in by_process.values())
    return report


def render(report: Report) -> Iterator[Table | Text]:
    """The report, for a rich console."""
    if not report.busy:
        yield Text("simulated NPU: no copies")
        return
    table = Table(title="simulated NPU")
    table.add_column("copies")
    for heading in ("submissions", "entries", "MiB", "busy ms", "GB/s"):
        table.add_column(heading, justify="right")
    for name, kind in report.kinds.items():
        table.add_row(
            KINDS[name],
            f"{kind.submissions}",
            f"{kind.entries}",
            f"{kind.bytes / 2**20:.1f}",
            f"{kind.busy * 1e3:.2f}",
            f"{kind.gbps:.2f}" if kind.busy else "-",
        )
    yield table
    if report.shorter:
        share = report.both / report.shorter
        yield Text(
            f"both directions of the link at once: {report.both * 1e3:.2f} ms "
            f"({share:.0%} of the less busy one)"
        )
    yield Text(
        f"host CPU spent on other work during copies: {report.host * 1e3:.2f} ms "
        f"({report.host / report.busy:.0%} of the time that copies took)"
    )


def _spans(entries: Iterable[dict[str, Any]], kind: str) -> Iterator[Interval]:
    return ((entry["start"], entry["end"]) for entry in entries if entry["kind"] == kind)


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _intersection(first: list[Interval], second: list[Interval]) -> list[Interval]:
    """Of two lists of disjoint, sorted intervals."""
    found = []
    i = j = 0
    while i < len(first) and j < len(second):
        start = max(first[i][0], second[j][0])
        end = min(first[i][1], second[j][1])
        if start < end:
            found.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return found


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def _host_cpu(entries: list[dict[str, Any]]) -> float:
    """CPU time of a process during its copies, less what the copies themselves took."""
    total = 0.0
    until = -1.0
    for entry in sorted(entries, key=lambda entry: float(entry["cpu_start"])):
        # The process's CPU clock is common to its threads: overlapping copies count once.
        total += max(0.0, entry["cpu_end"] - max(entry["cpu_start"], until))
        until = max(until, entry["cpu_end"])
        total -= entry["own_cpu"]
    return max(total, 0.0)
