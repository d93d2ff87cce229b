# SPDX-License-Identifier: Apache-2.0
"""Servers for the tests of what goes wrong."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from lmcache_rbln import simulator
from lmcache_rbln.lmcache_compat.server_process import LMCacheServer
from tests.faults.rig import CHUNK, Peer, small
from tests.stub.conftest import ops, transfer

__all__ = ["ops", "transfer"]


@pytest.fixture
def start() -> Iterator[Callable[..., LMCacheServer]]:
    """Start servers that end with the test."""
    started: list[LMCacheServer] = []

    def get(*arguments: str, pool_gb: float = 0.05, **options: object) -> LMCacheServer:
        server = LMCacheServer(
            chunk_size=CHUNK,
            pool_gb=pool_gb,
            arguments=["--max-workers", "2", *arguments],
            **{"environment": dict(os.environ), **options},
        )
        started.append(server)
        return server.start()

    yield get
    simulator.clear_faults()
    for server in started:
        server.stop()


@pytest.fixture(scope="module")
def shared_server() -> Iterator[LMCacheServer]:
    """One server for all tests of a module that leave it as it was."""
    with LMCacheServer(chunk_size=CHUNK, pool_gb=0.05, arguments=["--max-workers", "2"]) as server:
        yield server
        simulator.clear_faults()


@pytest.fixture
def peer(request: pytest.FixtureRequest) -> Iterator[Callable[..., Peer]]:
    """Workers of the test's own model, closed at its end."""
    opened: list[Peer] = []

    def join(server: LMCacheServer, layout: str = "kv_first", **options: object) -> Peer:
        opened.append(Peer(server, request.node.name, small(layout), **options))
        return opened[-1]

    yield join
    simulator.clear_faults()
    for one in opened:
        one.close()
