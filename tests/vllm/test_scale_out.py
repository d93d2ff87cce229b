# SPDX-License-Identifier: Apache-2.0
"""Beyond one host and one kind of device, by LMCache's own means."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from vllm_harness.engine import prompt
from vllm_harness.kv import HOST_LAYOUT, LAYOUTS, Geometry
from vllm_harness.processes import HOST

from lmcache_rbln.lmcache_compat.server_process import LMCacheServer

every_layout = pytest.mark.parametrize("layout", LAYOUTS)

Engines = Callable[..., Any]


class Redis:
    """A Redis server of the system's package, on a free port, that keeps nothing."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._process = subprocess.Popen(
            ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
             "--appendonly", "no", "--dir", str(folder)],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip

    def command(self, *words: str) -> str:
        """Send a command; the first line of the answer."""
        text = f"*{len(words)}\r\n" + "".join(f"${len(w)}\r\n{w}\r\n" for w in words)
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as link:
            link.sendall(text.encode())
            return link.makefile("rb").readline().decode().strip()

    def wait(self) -> None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                if self.command("PING") == "+PONG":
                    return
            except OSError:
                time.sleep(0.05)
        raise TimeoutError("redis-server does not answer")

    def size(self) -> int:
        return int(self.command("DBSIZE").removeprefix(":"))

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(10)


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Redis]:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed; it is a package of the system")
    server = Redis(tmp_path_factory.mktemp("redis"))
    server.wait()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def rack(redis: Redis) -> Iterator[list[str]]:
    """Two LMCache servers at two addresses, with little memory, over one second tier."""
    tier = f'{{"type":"resp","host":"127.0.0.1","port":{redis.port},"num_workers":2}}'
    servers = []
    for address in ("127.0.0.2", "127.0.0.3"):
        arguments = ["--host", address, "--l2-adapter", tier, "--eviction-ratio", "0.5"]
        server = LMCacheServer(chunk_size=64, pool_gb=0.02, arguments=arguments)
        servers.append((address, server.start()))
    yield [server.url.replace("127.0.0.1", address) for address, server in servers]
    for _, server in servers:
        server.stop()


#: Seconds between two looks of the server at what to evict.
EVICTION = 1.0

#: A chunk of 64 tokens is 1 MiB, MLA: 512 KiB; a server's memory holds 20 of them.
BIG = {"num_layers": 4, "num_heads": 4, "head_size": 256, "num_blocks": 24, "block_size": 64}


def until(condition: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"{what}: not within {seconds:g} s")
        time.sleep(0.1)


@every_layout
def test_two_hosts_share_a_second_tier(
    rack: list[str], redis: Redis, engines: Engines, layout: str
) -> None:
    """What one host stored, the other loads; also after it was evicted from both servers."""
    geometry = Geometry(layout, **BIG)
    here = engines(rack[0], geometry, workers=(0,))
    there = engines(rack[1], geometry, workers=(1,))
    before = redis.size()
    prompts = [prompt(seed, 2 * 64 + 1) for seed in range(14)]

    def stored(tokens: list[int], chunks: int) -> bool:
        # A chunk for which there was no room is not stored; the server evicts once a second.
        here.run_one(tokens)
        time.sleep(EVICTION / 4)
        return redis.size() >= before + chunks

    for number, tokens in enumerate(prompts, 1):
        until(partial(stored, tokens, 2 * number), "the second tier has the chunks")
    # 28 chunks passed through memory for 20: the first ones are only in the second tier.
    for tokens in prompts:
        assert there.loaded[there.run_one(tokens)] == 128
        time.sleep(EVICTION / 4)
    here.forget_local_cache()
    for tokens in prompts[:3]:
        assert here.loaded[here.run_one(tokens)] == 128
        time.sleep(EVICTION / 4)
    for engine in (here, there):
        engine.check_over()


@every_layout
def test_another_device_and_back(
    servers: Callable[[int], str], engines: Engines, layout: str
) -> None:
    """LMCache's CPU backend, with vLLM's layout there, shares chunks with an NPU."""
    host_layout = layout if layout == "mla" else HOST_LAYOUT
    npu = engines(servers(64), Geometry(layout), workers=(0,))
    host = engines(
        servers(64), Geometry(host_layout), workers=(HOST,), connector="stock", device="cpu"
    )
    npu.run_one(prompt(1, 200))
    assert host.loaded[host.run_one(prompt(1, 200))] == 192
    host.run_one(prompt(2, 200))
    assert npu.loaded[npu.run_one(prompt(2, 200))] == 192
    npu.check_over()
    host.check_over()
