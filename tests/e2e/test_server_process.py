# SPDX-License-Identifier: Apache-2.0
"""Starting and stopping a real ``lmcache server``."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_rbln.lmcache_compat.server_process import (
    LMCacheServer,
    ServerFailed,
    terminate_as_exit,
)
from lmcache_rbln.lmcache_compat.worker import ServerUnreachable, WorkerClient


def test_a_killed_server_starts_again_at_the_same_address(environments):
    server = LMCacheServer(chunk_size=64, pool_gb=0.02, environment=environments[0])
    with server:
        url, pid, segment = server.url, server.pid, server.shm_path
        assert segment.stat().st_size >= 0.02 * 2**30 - 4096
        server.kill()
        assert not server.is_running()
        assert not server.healthy()
        server.start()
        assert (server.url, server.shm_path) == (url, segment)
        assert server.pid != pid
        with WorkerClient(url, model_name="m", timeout=30) as client:
            assert client.chunk_size == 64
        assert "Uvicorn running" in server.log_tail()
        with pytest.raises(RuntimeError, match="runs already"):
            server.start()
    assert not segment.exists()
    assert not server.is_running()
    assert server.log_tail() == ""
    server.stop()


def test_a_server_that_cannot_start_says_why(environments, tmp_path):
    server = LMCacheServer(
        chunk_size=64,
        pool_gb=0.02,
        arguments=["--no-such-option"],
        environment=environments[0],
        log_path=tmp_path / "log",
    )
    with pytest.raises(ServerFailed, match=r"(?s)exit code 2 .*--no-such-option"):
        server.start()
    assert not server.shm_path.exists()
    # A log that the caller asked for stays.
    assert "--no-such-option" in (tmp_path / "log").read_text()


def test_an_unreachable_server_is_named():
    with pytest.raises(ServerUnreachable, match=r"tcp://127\.0\.0\.1:9 .*get_chunk_size.* 0.5 s"):
        WorkerClient("tcp://127.0.0.1:9", model_name="m", timeout=0.5)


@pytest.fixture
def handle() -> Iterator[Callable[[int, Any], Any]]:
    """Sets the handler of a signal; whatever the tests were started with is back afterwards."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield signal.signal
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_block_in_order(number, handle):
    seen = []
    handle(number, signal.SIG_DFL)  # it is ignored under nohup
    with pytest.raises(SystemExit) as ended, terminate_as_exit():
        try:
            os.kill(os.getpid(), number)
            signal.pause()
        finally:
            seen.append("cleaned up")
    assert ended.value.code == 128 + number
    assert seen == ["cleaned up"]
    assert signal.getsignal(number) == signal.SIG_DFL


def test_an_ignored_hangup_stays_ignored(handle):
    handle(signal.SIGHUP, signal.SIG_IGN)
    with terminate_as_exit():
        os.kill(os.getpid(), signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_no_segment_without_shared_memory(servers):
    server = servers("pickle")
    assert server.shm_path is None
    assert not list(Path("/dev/shm").glob(f"*{server.url.rpartition(':')[2]}*"))
