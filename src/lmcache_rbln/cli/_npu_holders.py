# SPDX-License-Identifier: Apache-2.0
"""Which processes hold NPUs, as far as the system tells; nothing is opened."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path

#: RBLN's device nodes are /dev/rbln0, /dev/rbln1, ... (RBLN driver 3; vendor's container guide).
_NODE = re.compile(r"rbln(\d+)")
#: The vendor's monitors open the nodes without using the NPUs.
_MONITORS = ("rbln_daemon", "rbln-smi", "rbln-stat")
#: Linux's ``struct flock``: type, whence, start, length, process id.
_FLOCK = struct.Struct("@hhqqi4x")


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
    for process in proc.iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    target = Path(os.readlink(descriptor))
                    match = _NODE.fullmatch(target.name)
                    if target.parent == dev and match:
                        pid = int(process.name)
                        found.add(Holder(int(match[1]), pid, _name(pid, proc)))
    return sorted(
        (holder for holder in found if holder.name not in _MONITORS),
        key=lambda holder: (holder.npu, holder.pid),
    )


def of_simulated(npus: int) -> list[Holder]:
    """The processes that hold the first ``npus`` simulated NPUs.

    The simulated runtime holds NPU i by a record lock on byte i of a file (``runtime/npu.cpp``).
    """
    name = f"rbln-sim-{os.geteuid()}-{os.environ.get('RBLN_SIM_HOST') or 'default'}.lock"
    for folder in ("/dev/shm", "/tmp"):
        with contextlib.suppress(OSError):
            descriptor = os.open(Path(folder, name), os.O_RDWR)
            break
    else:
        return []
    try:
        holders = []
        for npu in range(npus):
            asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, npu, 1, 0)
            kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
            if kind != fcntl.F_UNLCK:
                holders.append(Holder(npu, pid, _name(pid)))
        return holders
    finally:
        os.close(descriptor)


def _name(pid: int, proc: Path = Path("/proc")) -> str:
    try:
        return (proc / str(pid) / "comm").read_text().strip()
    except OSError:
        return ""
