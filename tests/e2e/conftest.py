# SPDX-License-Identifier: Apache-2.0
"""Real servers and worker processes, shared by the tests of one test process.

Each test process has servers, ports, shared-memory names and simulated NPUs of its own, so any
number of them run side by side. Tests do not see each other's chunks: each has its own model name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict

import pytest

from lmcache_rbln import simulator
from lmcache_rbln.cli import _devices
from lmcache_rbln.cli._known_kv import Geometry
from lmcache_rbln.cli._worker_process import WorkerProcess
from lmcache_rbln.lmcache_compat.server_process import LMCacheServer
from tests.e2e.e2e_workers import CHUNK, TRANSPORTS, Worker


@pytest.fixture(scope="session")
def environments() -> tuple[dict[str, str], dict[str, str]]:
    """Environments of two worker processes, each with a simulated NPU of its own."""
    base = simulator.environment(npus=2, host=simulator.unique_host())
    return _devices.worker_environments(base, 2)


@pytest.fixture(scope="session")
def servers(environments) -> Iterator[Callable[[str], LMCacheServer]]:
    """The running server of a transport; started when first asked for."""
    started: dict[str, LMCacheServer] = {}

    def get(transport: str) -> LMCacheServer:
        if transport not in started:
            started[transport] = LMCacheServer(
                chunk_size=CHUNK,
                pool_gb=0.05,
                shared_memory=transport == "shared memory",
                arguments=["--max-workers", "2"],
                environment=environments[0],
            ).start()
        return started[transport]

    yield get
    for server in started.values():
        server.stop()


@pytest.fixture(params=TRANSPORTS)
def server(request, servers) -> LMCacheServer:
    """The server of either transport."""
    return servers(request.param)


@pytest.fixture
def shm_server(servers) -> LMCacheServer:
    """The server with shared memory, for what does not depend on the transport."""
    return servers("shared memory")


@pytest.fixture(scope="session")
def processes(environments) -> Iterator[tuple[WorkerProcess, WorkerProcess]]:
    """Two worker processes, loaded."""
    with (
        WorkerProcess("worker 0", environment=environments[0]) as one,
        WorkerProcess("worker 1", environment=environments[1]) as two,
    ):
        one.begin("prepare")
        two.begin("prepare")
        backends = [process.finish("prepare")["backend"] for process in (one, two)]
        assert backends == ["lmcache_rbln._rbln_device_spec.RblnDeviceSpec"] * 2
        yield one, two


@pytest.fixture
def join(request, processes) -> Iterator[Callable[..., Worker]]:
    """Join one of the two processes to a server, with a wiped cache of a geometry."""

    def get(
        number: int,
        server: LMCacheServer,
        geometry: Geometry,
        *,
        chunks: int = 3,
        store_mode: str = "auto",
        model_name: str = request.node.name,
        **connection,
    ) -> Worker:
        process = processes[number]
        answer = process.call("connect", url=server.url, model_name=model_name, **connection)
        assert answer["chunk_size"] == CHUNK
        agreed = process.call("register", geometry=asdict(geometry), store_mode=store_mode)
        assert agreed["transport"] == ("shared memory" if server.shared_memory else "pickle")
        # The genuine torch-rbln offers what LMCache's asynchronous context needs.
        assert agreed["is_async"] == (store_mode != "sync")
        return Worker(process, server, geometry, tokens=list(range(chunks * CHUNK)))

    yield get
    for process in processes:
        process.call("disconnect")
