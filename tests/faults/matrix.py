# SPDX-License-Identifier: Apache-2.0
"""A fault at every call of a transfer to the runtime, through LMCache's own contexts and server.

For each layout, direction, context, transport and size, the runtime's calls are counted once. Then
the transfer is done again, once for every call and fault. After each: it reported failure, or every
byte is right; a failed store left nothing to hit; no block outside the request changed; the next
operation works; no lock, thread, descriptor, shared-memory segment or device allocation is left.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch

from lmcache_rbln import block_transfer, self_check, simulator
from lmcache_rbln.cli._known_kv import LAYOUTS, WIPED, Geometry
from lmcache_rbln.lmcache_compat.server_process import LMCacheServer
from tests.faults.rig import BLOCK, CHUNK, L1, PER_CHUNK, Peer, l1, small

CHUNKS = 3
WAYS = ("store", "retrieve")
MODES = ("sync", "async")
TRANSPORTS = ("shm", "pickle")

#: ``large`` takes several steps, collected on the NPU; ``first`` is the first transfer of its
#: geometry, which is checked before.
SIZES = ("small", "large", "first")

#: Kinds of calls, as the simulated runtime counts them. An NPU is opened once a process.
KINDS = ("h2v", "v2h", "v2v", "malloc", "sync", "borrow")
COPIES = ("h2v", "v2h", "v2v")

#: Faults of one call. torch-rbln does a bulk copy that failed again, entry by entry: ``fail2`` lets
#: that fail too.
ACTIONS = ("fail", "fail2", "short", "lost", "hang=0.03")


@dataclass(frozen=True)
class Case:
    """One transfer with one fault."""

    layout: str
    way: str
    mode: str
    transport: str
    size: str
    kind: str = ""
    number: int = 0
    action: str = ""

    def __str__(self) -> str:
        where = f"{self.layout}/{self.way}/{self.mode}/{self.transport}/{self.size}"
        return f"{where}/{self.kind}@{self.number}={self.action}" if self.kind else where

    @classmethod
    def parse(cls, text: str) -> Case:
        layout, way, mode, transport, size, fault = text.split("/")
        call, _, action = fault.partition("=")
        kind, _, number = call.partition("@")
        return cls(layout, way, mode, transport, size, kind, int(number), action)

    @property
    def fault(self) -> str:
        if self.action == "fail2":
            return f"{self.kind}@{self.number}=fail;{self.kind}@{self.number + 1}=fail"
        return f"{self.kind}@{self.number}={self.action}"


@dataclass
class Tally:
    """What came of the cases."""

    cases: int = 0
    injected: int = 0
    reported: int = 0
    harmless: int = 0
    silent: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)
    by_action: Counter[str] = field(default_factory=Counter)

    @property
    def good(self) -> bool:
        return not (self.silent or self.leaks or self.other)

    def __str__(self) -> str:
        return (
            f"{self.cases} cases, {self.injected} faults injected, {self.reported} failures "
            f"reported, {self.harmless} transfers exact all the same; silent errors: "
            f"{len(self.silent)}, leaks: {len(self.leaks)}, other defects: {len(self.other)}"
        )


class WrongError(AssertionError):
    """A case came out wrong; ``kind`` is ``silent``, ``leaks`` or ``other``."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def cases(base: Case, calls: dict[str, int]) -> Iterator[Case]:
    """Every call of a transfer with every fault that it can have."""
    for kind in KINDS:
        for number in range(1, calls.get(kind, 0) + 1):
            for action in ACTIONS:
                if action == "short" and kind not in COPIES:
                    continue
                yield replace(base, kind=kind, number=number, action=action)


def bases(
    layouts: tuple[str, ...] = LAYOUTS,
    transports: tuple[str, ...] = TRANSPORTS,
    sizes: tuple[str, ...] = SIZES,
) -> list[Case]:
    return [
        Case(layout, way, mode, transport, size)
        for transport in transports
        for layout in layouts
        for size in sizes
        for mode in MODES
        for way in WAYS
    ]


def geometry_of(layout: str, size: str) -> Geometry:
    if size == "large":
        # Of 1.5 MiB, 1.1 MiB for MLA: steps of 1 MiB (see `environment`), 12 runs a layer and more.
        heads, width = (1, 384) if layout == "mla" else (4, 64)
        return Geometry(layout, 8, 26, heads, BLOCK, width)
    return small(layout, blocks=26)


def environment() -> dict[str, str]:
    """Settings of the process under which even small transfers take several steps."""
    return {"LMCACHE_RBLN_STAGING_MB": "1", "LMCACHE_RBLN_DEVICE_STAGING_MB": "1"}


#: LMCache's threads start as stores come in, and each may open a descriptor.
THREADS = 4


def _staging_buffers() -> int:
    """On the NPUs: a transfer makes what it needs, a failed copy sets its own aside for a while."""
    shared = block_transfer._current
    pools = shared.staging._on_device.values() if shared else ()
    return sum(pool._made + len(pool._aside) for pool in pools)


def _mapped_segments() -> set[str]:
    with open("/proc/self/maps") as maps:
        return {line.split(maxsplit=5)[5].strip() for line in maps if "/dev/shm/" in line}


@dataclass(frozen=True)
class Resources:
    """What a transfer must not leave behind."""

    threads: frozenset[str]
    descriptors: int
    segments: frozenset[str]
    allocations: int  # on NPUs, but for staging

    @classmethod
    def now(cls) -> Resources:
        return cls(
            frozenset(thread.name for thread in threading.enumerate()),
            len(os.listdir("/proc/self/fd")),
            frozenset(_mapped_segments()),
            simulator.counters()["live_allocations"] - _staging_buffers(),
        )

    def leaked_since(self, before: Resources) -> str:
        found = []
        # LMCache's pool starts its (four) threads as stores come in.
        threads = {
            name for name in self.threads - before.threads if "lmcache_engine_driven" not in name
        }
        if threads:
            found.append(f"threads {sorted(threads)}")
        if self.descriptors > before.descriptors + THREADS:
            found.append(f"{self.descriptors - before.descriptors} descriptors")
        if self.segments - before.segments:
            found.append(f"segments {sorted(self.segments - before.segments)}")
        if self.allocations > before.allocations:
            found.append(f"{self.allocations - before.allocations} device allocations")
        return ", ".join(found)


#: No two contents of a process are the same: what one case stored, none may hit in another.
_contents = itertools.count(1)


class Bench:
    """Two workers on one server: one does what the case says, the other sees what came of it.

    Args:
        server: The server.
        base: The case without its fault.
        seed: Of the choice of blocks.
    """

    def __init__(self, server: LMCacheServer, base: Case, seed: int) -> None:
        self._server, self._base, self._seed = server, base, seed
        self._stack = ExitStack()
        model = f"{base}/{seed}"
        geometry = geometry_of(base.layout, base.size)
        options = {"mode": base.mode, "timeout": 20.0}
        self._one = self._stack.enter_context(Peer(server, model, geometry, **options))
        self._two = self._stack.enter_context(Peer(server, model, geometry, **options))
        self._kept = next(_contents)
        self._kept_blocks = self._blocks(str(base))
        self._two.write(self._kept, self._kept_blocks)
        self._expect(self._two.store(self._kept, self._kept_blocks, chunks=CHUNKS) is True, "store")
        self._at_first: Resources | None = None

    def close(self) -> None:
        simulator.clear_faults()
        self._stack.close()

    def calls(self) -> dict[str, int]:
        """Count the calls of the transfer without a fault."""
        counted: dict[str, int] = {}
        # The second time, so that buffers are there already, as in most transfers.
        for _ in range(2):
            content, blocks = self._prepare(str(self._base))
            simulator.reset_counters()
            done = self._transfer(content, blocks)
            counted = dict(simulator.counters()["calls"])
            self._expect(done is True, f"{self._base} failed without a fault")
        self._at_first = Resources.now()
        return counted

    def run(self, case: Case, tally: Tally) -> None:
        """One case.

        Raises:
            WrongError: It came out wrong.
        """
        content, blocks = self._prepare(str(case))
        assert self._at_first is not None
        # Against the start of all cases: a leak of one a case adds up.
        before, locks = self._at_first, l1(self._server)
        fired = simulator.counters()["faults_fired"]
        simulator.inject(case.fault)
        try:
            done = self._transfer(content, blocks)
        finally:
            tally.injected += simulator.counters()["faults_fired"] - fired
            simulator.clear_faults()
        tally.cases += 1
        tally.by_action[case.action] += 1
        if done:
            tally.harmless += 1
        else:
            tally.reported += 1
        if case.way == "store":
            self._after_store(content, blocks, done)
        else:
            self._after_retrieve(content, blocks, done)
        self._no_leak(before, locks)

    def _transfer(self, content: int, blocks: list[int]) -> bool:
        if self._base.size == "first":
            self_check._verdicts.clear()
        if self._base.way == "store":
            return self._one.store(content, blocks, chunks=CHUNKS)
        done = self._one.retrieve(content, blocks, chunks=CHUNKS)
        self._expect(done is not None, "the chunks are gone from the server")
        return bool(done)

    def _prepare(self, salt: str) -> tuple[int, list[int]]:
        blocks = self._blocks(salt)
        if self._base.way == "retrieve":
            self._one.write(0, [])
            return self._kept, blocks
        content = next(_contents)
        self._one.write(content, blocks)
        return content, blocks

    def _after_store(self, content: int, blocks: list[int], done: bool) -> None:
        if difference := self._one.difference(content, blocks):
            raise WrongError("silent", f"the store changed the cache: {difference}")
        if done:
            self._expect_on_server(content, "a store that reported success")
            return
        if hits := self._two.hits(content, CHUNKS):
            raise WrongError("silent", f"{hits} chunks of a failed store are served")
        self._expect(self._one.store(content, blocks, chunks=CHUNKS) is True, "the next store")
        self._expect_on_server(content, "the store after a failure")

    def _after_retrieve(self, content: int, blocks: list[int], done: bool) -> None:
        if done:
            if difference := self._one.difference(content, blocks):
                raise WrongError("silent", f"a retrieve that reported success: {difference}")
            return
        self._expect_untouched(blocks)
        retried = self._one.retrieve(content, blocks, chunks=CHUNKS)
        self._expect(retried is True, f"the next retrieve: {retried}")
        if difference := self._one.difference(content, blocks):
            raise WrongError("silent", f"the retrieve after a failure: {difference}")

    def _expect_on_server(self, content: int, what: str) -> None:
        into = self._blocks(what)
        self._two.write(0, [])
        got = self._two.retrieve(content, into, chunks=CHUNKS)
        if got is not True:
            kind = "silent" if got is None else "other"
            raise WrongError(kind, f"{what}: retrieving it gave {got}")
        if difference := self._two.difference(content, into):
            raise WrongError("silent", f"{what}: {difference}")

    def _expect_untouched(self, written: list[int]) -> None:
        axis = 1 if self._base.layout == "kv_first" else 0
        others = [block for block in range(self._one.geometry.blocks) if block not in written]
        for layer in self._one.cache.layers.values():
            left = layer.cpu().index_select(axis, torch.tensor(others))
            if not bool((left.contiguous().view(torch.uint8) == WIPED).all()):
                raise WrongError("silent", "a failed retrieve changed a block outside the request")

    def _no_leak(self, before: Resources, locks: L1) -> None:
        # A thread ends, and a server answers, a moment after what it was needed for.
        deadline = time.monotonic() + 2
        while True:
            left = Resources.now().leaked_since(before)
            after = l1(self._server)
            if (after.write_locked, after.read_locked) != (locks.write_locked, locks.read_locked):
                left += f" locks {after}, before {locks}"
            if not left:
                return
            if time.monotonic() > deadline:
                raise WrongError("leaks", left)
            gc.collect()  # The traceback of a failure holds what was used.
            time.sleep(0.05)

    def _blocks(self, salt: str) -> list[int]:
        chosen = random.Random(f"{self._seed}/{salt}")
        # Block 0 is never asked for: whatever writes it is wrong.
        return chosen.sample(range(1, geometry_of(self._base.layout, self._base.size).blocks), 12)

    @staticmethod
    def _expect(condition: bool, what: str) -> None:
        if not condition:
            raise WrongError("other", f"{what} did not work")


assert CHUNKS * PER_CHUNK == 12


class Servers:
    """The server of a transport; started when first asked for."""

    def __init__(self) -> None:
        self._started: dict[str, LMCacheServer] = {}

    def __getitem__(self, transport: str) -> LMCacheServer:
        if transport not in self._started:
            self._started[transport] = LMCacheServer(
                chunk_size=CHUNK,
                pool_gb=0.25,
                shared_memory=transport == "shm",
                arguments=["--max-workers", "2"],
            ).start()
        return self._started[transport]

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._started.values():
            server.stop()
