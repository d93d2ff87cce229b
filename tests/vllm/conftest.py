# SPDX-License-Identifier: Apache-2.0
"""Connectors without a model: real vLLM, LMCache server and torch-rbln over the simulated NPU."""

from __future__ import annotations

import faulthandler
import importlib.metadata
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import lmcache_rbln.simulator.engine

#: Longest that one test may take, in seconds; all waits in the harness are shorter.
LIMIT = 240.0


def _is_installed(name: str) -> bool:
    # By its metadata: importing vLLM loads torch, which must find the simulated runtime first,
    # and a folder called vllm, such as this one, passes for a package.
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


# vLLM-RBLN's platform needs the compiler; the connectors do not need the platform.
os.environ.update(
    {
        "VLLM_PLUGINS": "__none__",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_DISABLE_BANNER": "1",
        "PYTHONHASHSEED": "0",
    }
)
os.environ.setdefault("OMP_NUM_THREADS", "1")

MISSING = [name for name in ("vllm", "vllm-rbln") if not _is_installed(name)]
collect_ignore_glob = ["test_*.py"] if MISSING else []

# Test modules are imported by path; the harness is a package of its own. vLLM-RBLN's packages
# import the compiler's as they load.
os.environ.update(lmcache_rbln.simulator.engine.environment())
sys.path[:0] = [str(Path(__file__).parent), str(lmcache_rbln.simulator.engine.site_directory())]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(autouse=True)
def _watchdog(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that hangs fails, with the stacks of all threads."""

    def too_long(*_: Any) -> None:
        faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
        raise TimeoutError(f"the test took longer than {LIMIT:g} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, LIMIT)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="session")
def servers() -> Iterator[Callable[..., str]]:
    """URL of a server of that chunk size; one each, for all tests that do not harm it.

    Another ``name`` is another server.
    """
    from lmcache_rbln.lmcache_compat.server_process import LMCacheServer

    running: dict[tuple[int, str], LMCacheServer] = {}

    def url(chunk_size: int, name: str = "") -> str:
        server = running.get((chunk_size, name))
        if server is None or not server.is_running():
            server = LMCacheServer(chunk_size=chunk_size, pool_gb=0.25).start()
            running[chunk_size, name] = server
        return server.url

    yield url
    for server in running.values():
        server.stop()


@pytest.fixture(scope="session")
def _mortal_server() -> Iterator[Any]:
    from vllm_harness.servers import MortalServer

    server = MortalServer()
    yield server
    server.stop()


@pytest.fixture
def mortal_server(_mortal_server: Any) -> Any:
    """A running server of chunks of 64 tokens that a test may freeze, kill and start again."""
    _mortal_server.start()
    return _mortal_server


@pytest.fixture
def own_server() -> Iterator[Callable[..., Any]]:
    """Makes servers of a test's own, with settings of its own."""
    from vllm_harness.servers import MortalServer

    made: list[MortalServer] = []

    def make(**settings: Any) -> MortalServer:
        server = MortalServer(**settings)
        made.append(server)
        server.start()
        return server

    yield make
    for server in made:
        server.stop()


@pytest.fixture(scope="session")
def worker_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Any]]:
    from vllm_harness.processes import WorkerProcess

    folder = tmp_path_factory.mktemp("workers")
    processes: dict[int, Any] = {}

    def get(index: int) -> Any:
        worker = processes.get(index)
        if worker is None or not worker.is_alive():
            worker = processes[index] = WorkerProcess(index, folder, dict(os.environ))
        return worker

    yield get
    for worker in processes.values():
        worker.close()


@pytest.fixture
def worker(worker_pool: Callable[[int], Any]) -> Callable[[int], Any]:
    """Worker process by index; its NPU has the same index."""
    return worker_pool


@pytest.fixture
def engines(
    worker_pool: Callable[[int], Any], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Any]]:
    """Makes engines; the workers of several must be different ones, by index or process."""
    from vllm_harness.engine import Engine

    made: list[Engine] = []

    def make(
        server_url: str, geometry: Any, *, workers: tuple[Any, ...] = (0,), **rest: Any
    ) -> Any:
        model = rest.pop("model", tmp_path / "model")
        processes = [worker_pool(one) if isinstance(one, int) else one for one in workers]
        engine = Engine(processes, server_url, model, geometry, **rest)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        if getattr(request.node, "failed", False):
            for worker in engine.workers:
                print(f"--- worker {worker.pid}\n{worker.tail()}")
        engine.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if report.failed:
        item.failed = True  # type: ignore[attr-defined]
    return report


@pytest.fixture(scope="session", autouse=True)
def _registered() -> None:
    """vLLM-RBLN's own registration of its connectors, which its platform would do."""
    from vllm_rbln.patches.kv_connector_factory import register_rbln_kv_connectors

    register_rbln_kv_connectors()
