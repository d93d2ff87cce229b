# SPDX-License-Identifier: Apache-2.0
"""``lmcache-rbln demo``: store KV blocks from one process, retrieve them in another, compare all.

A real ``lmcache server`` process, two worker processes with KV caches on NPUs, LMCache's own
transfer contexts. Without an NPU the workers run on the simulated one.
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import random
import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from lmcache_rbln import __version__, simulator
from lmcache_rbln.cli._devices import Devices, find_devices
from lmcache_rbln.cli._files import unwritable, write_report
from lmcache_rbln.cli._known_kv import Geometry
from lmcache_rbln.cli._worker_process import WorkerFailed, WorkerProcess
from lmcache_rbln.lmcache_compat.server_process import (
    LMCacheServer,
    ServerFailed,
    terminate_as_exit,
)

#: Tokens a chunk and a block: two blocks a chunk, so that blocks must be put together.
_CHUNK_SIZE = 256
_BLOCK_SIZE = 128
_CHUNKS = 8
#: More blocks than are stored, so that there are others which must not change.
_CACHE_BLOCKS = 40
#: An 8B model's heads at a quarter of its layers; DeepSeek-V2-Lite's latent width and layers.
_GEOMETRIES = {
    "blocks-first": Geometry("blocks_first", 8, _CACHE_BLOCKS, 8, _BLOCK_SIZE, 128),
    "K/V-first": Geometry("kv_first", 8, _CACHE_BLOCKS, 8, _BLOCK_SIZE, 128),
    "MLA": Geometry("mla", 27, _CACHE_BLOCKS, 1, _BLOCK_SIZE, 576),
}
_POOL_GB = 0.5
#: What one layout consists of, for the progress bar.
_STEPS = ("write", "store", "look up", "retrieve", "compare")


class DemoFailed(RuntimeError):  # noqa: N818
    """The demo could not prove what it is there for; the text says why."""


@dataclass
class LayoutResult:
    """What became of one layout.

    Attributes:
        layout: its name.
        mib: MiB stored, and retrieved.
        store_gbps: GB/s (1e9 bytes) of the store, lookup of free memory and commit included.
        retrieve_gbps: GB/s of the retrieve.
        transport: how the chunks travelled.
        error: "" if every byte was as it must be, else what was not.
    """

    layout: str
    mib: float
    store_gbps: float
    retrieve_gbps: float
    transport: str
    error: str

    @property
    def verdict(self) -> str:
        """The last column of the table."""
        return self.error or "exact"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to ``lmcache-rbln``."""
    parser = subparsers.add_parser(
        "demo",
        help="store and retrieve KV blocks through a real LMCache server and compare every byte",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results to FILE")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the demo.

    Returns:
        0 if every byte of every layout was as it must be, else 1; 2 for unusable arguments, 130
        after Ctrl-C.
    """
    console = Console()
    if args.json and (problem := unwritable(args.json)):
        console.print(f"--json: {problem}", markup=False)
        return 2
    results: list[LayoutResult] = []
    about = {"lmcache-rbln": __version__, "python": platform.python_version()}
    failure = device = ""
    try:
        with terminate_as_exit():
            devices = find_devices()
            device = devices.name
            console.print(f"Device: [bold]{device}[/]")
            console.print(Text(devices.why, style="dim"))
            console.print("Starting a server and two workers; the whole takes a minute or two.")
            results.extend(_layouts(devices, console, about))
    except (DemoFailed, ServerFailed, WorkerFailed, simulator.SimulatorError, ValueError) as error:
        failure = str(error)
    except KeyboardInterrupt:
        console.print("interrupted; the server and the workers were stopped")
        return 128 + signal.SIGINT
    exact = len(results) == len(_GEOMETRIES) and not failure and not any(r.error for r in results)
    _show(console, results, device, about)
    if failure:
        console.print(Text(failure))
    console.print(
        f"[bold green]Every byte is exact.[/] Device: {device}."
        if exact
        else "[bold red]The demo failed.[/]"
    )
    if args.json:
        report = {
            "exact": exact,
            "device": device,
            "versions": about,
            "layouts": [{**asdict(result), "verdict": result.verdict} for result in results],
            "error": failure,
        }
        if problem := write_report(args.json, report):
            console.print(f"--json: {problem}", markup=False)
            return 1
    return 0 if exact else 1


def _layouts(devices: Devices, console: Console, about: dict[str, str]) -> Iterator[LayoutResult]:
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(progress)
        task = progress.add_task("starting", total=2 + len(_GEOMETRIES) * len(_STEPS))

        def step(what: str) -> None:
            progress.update(task, description=what, advance=1)

        # The workers load torch while the server starts.
        storing = stack.enter_context(_worker("storing worker", devices.environments[0]))
        retrieving: WorkerProcess | None = None
        if not devices.shared:
            retrieving = stack.enter_context(_worker("retrieving worker", devices.environments[1]))
        progress.update(task, description="starting lmcache server")
        server = stack.enter_context(
            LMCacheServer(
                chunk_size=_CHUNK_SIZE,
                pool_gb=_POOL_GB,
                environment=devices.server_environment,
            )
        )
        step("starting workers")
        about.update(_prepared(storing))
        if retrieving is not None:
            _prepared(retrieving)
        step("")
        try:
            rounds = [_Round(name, number) for number, name in enumerate(_GEOMETRIES)]
            if retrieving is not None:
                for one in rounds:
                    one.store(storing, server.url, step)
                    yield one.retrieve(retrieving, server.url, step)
                return
            for one in rounds:
                one.store(storing, server.url, step)
            storing.stop()
            retrieving = stack.enter_context(_worker("retrieving worker", devices.environments[1]))
            _prepared(retrieving)
            for one in rounds:
                yield one.retrieve(retrieving, server.url, step)
        except WorkerFailed as error:
            raise WorkerFailed(f"{error}\nThe server's log ends:\n{server.log_tail(15)}") from error


def _worker(name: str, environment: dict[str, str]) -> WorkerProcess:
    worker = WorkerProcess(name, environment=environment)
    worker.begin("prepare")
    return worker


def _prepared(worker: WorkerProcess) -> dict[str, str]:
    """Wait for a worker to be loaded; gives the versions of what it runs on.

    Raises:
        DemoFailed: LMCache chose another backend in it.
    """
    loaded: dict[str, str] = worker.finish("prepare")
    backend = loaded.pop("backend")
    if not backend.startswith("lmcache_rbln."):
        raise DemoFailed(
            f"LMCache chose the backend {backend} instead of lmcache-rbln; unset "
            "LMCACHE_DEVICE_BACKEND and DEVICE_TYPE, and see the worker's output:\n"
            f"{worker.log_tail()}"
        )
    return loaded


class _Round:
    """One layout: stored by one worker, retrieved by another."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self._geometry = _GEOMETRIES[name]
        self._seed = number + 1
        tokens = _CHUNKS * _CHUNK_SIZE
        # Tokens of this layout's own: what one layout stored must not pass for another's.
        self._tokens = [self._seed * 100_000 + index for index in range(tokens)]
        blocks = tokens // _BLOCK_SIZE
        shuffled = random.Random(self._seed).sample(range(_CACHE_BLOCKS), 2 * blocks)
        # Two disjoint sets in scattered order: nothing ends up right by standing still.
        self._from, self._into = shuffled[:blocks], shuffled[blocks:]
        self._mib = 0.0
        self._store_gbps = 0.0
        self._error = ""

    def _placed(self, blocks: list[int]) -> list[tuple[int, int]]:
        return [(block, index * _BLOCK_SIZE) for index, block in enumerate(blocks)]

    def _join(self, worker: WorkerProcess, url: str) -> str:
        worker.call("connect", url=url, model_name=f"lmcache-rbln-demo-{self._geometry.layout}")
        joined = worker.call("register", geometry=asdict(self._geometry))
        return str(joined["transport"])

    def store(self, worker: WorkerProcess, url: str, step: Any) -> None:
        """Write known content and store it."""
        step(f"{self.name}: writing known content")
        self._join(worker, url)
        worker.call("write", seed=self._seed, placed=self._placed(self._from))
        step(f"{self.name}: storing")
        stored = worker.call(
            "store", token_ids=self._tokens, block_ids=self._from, request_id=f"{self.name} store"
        )
        nbytes = worker.call("nbytes", tokens=len(self._tokens))
        self._mib = nbytes / 2**20
        self._store_gbps = nbytes / stored["seconds"] / 1e9
        worker.call("end_session", request_id=f"{self.name} store")
        if not stored["done"]:
            self._error = f"the store failed; the worker's log ends:\n{worker.log_tail()}"

    def retrieve(self, worker: WorkerProcess, url: str, step: Any) -> LayoutResult:
        """Retrieve into a wiped cache, and compare all of it."""
        step(f"{self.name}: looking up")
        transport = self._join(worker, url)
        found = worker.call("lookup", token_ids=self._tokens, request_id=f"{self.name} retrieve")
        step(f"{self.name}: retrieving")
        gbps = 0.0
        if found != len(self._tokens):
            self._error = self._error or f"{found} of {len(self._tokens)} tokens were found"
        if not self._error:
            retrieved = worker.call(
                "retrieve",
                token_ids=self._tokens,
                block_ids=self._into,
                request_id=f"{self.name} retrieve",
            )
            gbps = self._mib * 2**20 / retrieved["seconds"] / 1e9
            if not retrieved["done"]:
                self._error = "the retrieve failed"
        step(f"{self.name}: comparing every byte")
        worker.call("end_session", request_id=f"{self.name} retrieve")
        self._error = self._error or worker.call(
            "difference", seed=self._seed, placed=self._placed(self._into)
        )
        return LayoutResult(self.name, self._mib, self._store_gbps, gbps, transport, self._error)


def _show(
    console: Console, results: list[LayoutResult], device: str, about: dict[str, str]
) -> None:
    if not results:
        return
    versions = ", ".join(f"{name} {version}" for name, version in about.items())
    table = Table(
        title=f"{device}: stored by one process, retrieved by another",
        caption=f"One cold transfer each. {versions}",
    )
    for column in ("layout", "MiB", "store GB/s", "retrieve GB/s", "transport", "verdict"):
        words = column in ("layout", "transport", "verdict")
        table.add_column(column, justify="left" if words else "right")
    for result in results:
        table.add_row(
            result.layout,
            f"{result.mib:.1f}",
            f"{result.store_gbps:.2f}",
            f"{result.retrieve_gbps:.2f}",
            result.transport,
            "[red]failed[/]" if result.error else "[green]exact[/]",
        )
    console.print(table)
    for result in results:
        if result.error:
            console.print(Text(f"{result.layout}: {result.error}", style="red"))
