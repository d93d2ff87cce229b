# SPDX-License-Identifier: Apache-2.0
"""Which processes hold NPUs, as far as the system tells; nothing is opened."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: RBLN's device nodes are /dev/rbln0, /dev/rbln1, ... (RBLN driver 3; vendor's container guide).
_NODE = re.compile(r"rbln(\d+)")
#: The vendor's monitors open the nodes without using the NPUs.
_MONITORS = ("rbln_daemon", "rbln-smi", "rbln-stat")


@dataclass(frozen=True)
class Holder:
    """A process that holds an NPU.

    Attributes:
        npu: the NPU, as this host counts them, from 0.
        pid: process id.
        name: the process's name; "" if the system does not tell.
    """

    npu: int
    pid: int
    name: str

    def __str__(self) -> str:
        return f"NPU {self.npu} by {self.name or 'a process'} (pid {self.pid})"


def device_nodes(dev: Path = Path("/dev")) -> list[int]:
    """Numbers of the RBLN device nodes, in order."""
    numbers = (_NODE.fullmatch(entry.name) for entry in dev.glob("rbln*"))
    return sorted(int(match[1]) for match in numbers if match)


def of_nodes(proc: Path = Path("/proc"), dev: Path = Path("/dev")) -> list[Holder]:
    """The processes that have a device node open, other than the vendor's monitors.

    Only root sees those of other users.
    """
    found = set()
    for pid, target in _descriptors(proc):
        path = Path(target)
        match = _NODE.fullmatch(path.name)
        if match and path.parent == dev:
            found.add(Holder(int(match[1]), pid, _name(pid, proc)))
    return sorted(
        (holder for holder in found if holder.name not in _MONITORS),
        key=lambda holder: (holder.npu, holder.pid),
    )


def of_simulated(npus: int, proc: Path = Path("/proc")) -> list[Holder]:
    """The processes that hold the first ``npus`` simulated NPUs.

    The simulated runtime holds NPU i by an abstract socket address (``runtime/npu.cpp``).
    """
    prefix = f"@rbln-sim/{os.geteuid()}/{os.environ.get('RBLN_SIM_HOST') or 'default'}/"
    held: dict[str, int] = {}  # descriptor's target to NPU
    with contextlib.suppress(OSError):
        for line in (proc / "net" / "unix").read_text().splitlines()[1:]:
            fields = line.split()
            number = fields[-1].removeprefix(prefix)
            if fields[-1].startswith(prefix) and number.isdigit() and int(number) < npus:
                held[f"socket:[{fields[6]}]"] = int(number)
    if not held:
        return []
    found = {
        Holder(held[target], pid, _name(pid, proc))
        for pid, target in _descriptors(proc)
        if target in held
    }
    return sorted(found, key=lambda holder: (holder.npu, holder.pid))


def _descriptors(proc: Path) -> Iterator[tuple[int, str]]:
    """Each process that may be looked at, with what one of its open descriptors leads to."""
    for process in proc.iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    yield int(process.name), os.readlink(descriptor)


def _name(pid: int, proc: Path = Path("/proc")) -> str:
    try:
        return (proc / str(pid) / "comm").read_text().strip()
    except OSError:
        return ""
