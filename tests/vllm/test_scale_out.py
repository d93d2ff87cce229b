# SPDX-License-Identifier: Apache-2.0
"""Beyond one host and one kind of device, by LMCache's own means."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from vllm_harness.engine import prompt
from vllm_harness.hosts import Host, two_hosts
from vllm_harness.kv import HOST_LAYOUT, LAYOUTS, Geometry
from vllm_harness.processes import HOST

from lmcache_rbln.lmcache_compat.server_process import LMCacheServer

every_layout = pytest.mark.parametrize("layout", LAYOUTS)

Engines = Callable[..., Any]


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as both:
        yield both


def free_port(host: Host) -> int:
    with host.inside(), socket.socket() as probe:
        probe.bind((host.address, 0))
        return int(probe.getsockname()[1])


class Redis:
    """A Redis server of the system's package, on a free port, that keeps nothing."""

    def __init__(self, host: Host, folder: Path) -> None:
        self._host = host
        self.port = free_port(host)
        with host.inside():
            self._process = subprocess.Popen(
                ["redis-server", "--port", str(self.port), "--bind", host.address, "--save", "",
                 "--appendonly", "no", "--protected-mode", "no", "--dir", str(folder)],
                stdout=subprocess.DEVNULL,
            )  # fmt: skip

    def command(self, *words: str) -> str:
        """Send a command; the first line of the answer."""
        text = f"*{len(words)}\r\n" + "".join(f"${len(w)}\r\n{w}\r\n" for w in words)
        with (
            self._host.inside(),
            socket.create_connection((self._host.address, self.port), timeout=5) as link,
        ):
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


class Folder:
    """A folder that both hosts see."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def size(self) -> int:
        return len(list(self.path.glob("*.data")))


@pytest.fixture(scope="module")
def tier(
    request: pytest.FixtureRequest,
    hosts: tuple[Host, Host],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Any]:
    """A second tier on the first host, and how a server is told of it."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "folder":
        yield Folder(folder), {"type": "fs", "base_path": str(folder)}
        return
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed; it is a package of the system")
    server = Redis(hosts[0], folder)
    server.wait()
    address = hosts[0].address
    yield server, {"type": "resp", "host": address, "port": server.port, "num_workers": 2}
    server.stop()


class Site:
    """What one host has of its own: an LMCache server, and a worker with an NPU."""

    def __init__(self, host: Host, index: int, folder: Path, pool_gb: float, *options: str) -> None:
        self._host = host
        arguments = ["--host", host.address, *options]
        self._server = LMCacheServer(chunk_size=64, pool_gb=pool_gb, arguments=arguments)
        with host.inside():
            self._server.start()
        self._worker = host.worker(index, folder)

    def engine(self, engines: Engines, geometry: Geometry) -> Any:
        """A new engine of this host, on its server."""
        url = self._server.url.replace("127.0.0.1", self._host.address)
        with self._host.inside():
            return engines(url, geometry, workers=(self._worker,))

    def status(self) -> str:
        """The server's status page."""
        with self._host.inside():
            return str(page("127.0.0.1", self._server.http_port, "/status"))

    def close(self) -> None:
        self._worker.close()
        self._server.stop()


@contextlib.contextmanager
def sites_at(
    hosts: tuple[Host, Host],
    folder: Path,
    pool_gb: float,
    options: Callable[[Host], list[str]],
) -> Iterator[list[Site]]:
    with contextlib.ExitStack() as stack:
        sites = []
        for index, host in enumerate(hosts):
            sites.append(Site(host, index, folder, pool_gb, *options(host)))
            stack.callback(sites[-1].close)
        yield sites


@pytest.fixture(scope="module")
def rack(
    hosts: tuple[Host, Host],
    tier: tuple[Any, dict[str, Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[list[Site]]:
    """An LMCache server on each host, with little memory, over one second tier."""
    options = ["--l2-adapter", json.dumps(tier[1]), "--eviction-ratio", "0.5"]
    with sites_at(hosts, tmp_path_factory.mktemp("rack"), 0.02, lambda host: options) as sites:
        yield sites


def page(address: str, port: int, path: str) -> Any:
    """What an HTTP page says."""
    with urllib.request.urlopen(f"http://{address}:{port}{path}", timeout=5) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def coordinator(
    hosts: tuple[Host, Host], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The URL of LMCache's coordinator, on the first host."""
    host = hosts[0]
    port = free_port(host)
    log = tmp_path_factory.mktemp("coordinator") / "log"
    with log.open("wb") as out, host.inside():
        process = subprocess.Popen(
            [sys.executable, "-m", "lmcache.cli.main", "coordinator", "--host", host.address,
             "--port", str(port)],
            stdout=out, stderr=out,
        )  # fmt: skip

    def answers() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            with host.inside():
                return page(host.address, port, "/instances") is not None
        except OSError:
            return False

    until(answers, "the coordinator answers", 120.0)
    yield f"http://{host.address}:{port}"
    process.terminate()
    process.wait(20)


@pytest.fixture(scope="module")
def peers(
    hosts: tuple[Host, Host], coordinator: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Site]]:
    """An LMCache server on each host, which read each other's memory; no second tier."""
    if importlib.util.find_spec("nixl_cu12") is None:
        pytest.skip("NIXL is not installed, by which LMCache's servers read each other's memory")

    def options(host: Host) -> list[str]:
        return [
            *("--coordinator-url", coordinator, "--coordinator-advertise-ip", host.address),
            *("--coordinator-heartbeat-interval", "1"),
            *("--p2p-advertise-url", f"{host.address}:{free_port(host)}"),
        ]

    with sites_at(hosts, tmp_path_factory.mktemp("peers"), 0.25, options) as sites:

        def found() -> bool:
            return all("'p2p_peer_count': 1" in site.status() for site in sites)

        until(found, "the servers find each other", 60.0)
        yield sites


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


@pytest.mark.parametrize(
    ("tier", "layout"),
    [*(("redis", layout) for layout in LAYOUTS), ("folder", LAYOUTS[0])],
    indirect=["tier"],
)
def test_two_hosts_share_a_second_tier(
    rack: list[Site], tier: tuple[Any, dict[str, Any]], engines: Engines, layout: str
) -> None:
    """What one host stored, the other loads; also after it was evicted from both servers."""
    geometry = Geometry(layout, **BIG)
    here, there = (site.engine(engines, geometry) for site in rack)
    second, _ = tier
    before = second.size()
    prompts = [prompt(seed, 2 * 64 + 1) for seed in range(14)]

    def stored(tokens: list[int], chunks: int) -> bool:
        # A chunk for which there was no room is not stored; the server evicts once a second.
        here.run_one(tokens)
        time.sleep(EVICTION / 4)
        return bool(second.size() >= before + chunks)

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
def test_two_hosts_read_each_others_memory(
    peers: list[Site], engines: Engines, layout: str
) -> None:
    """LMCache's P2P: what one server holds, the other serves to an NPU; both ways."""
    here, there = (site.engine(engines, Geometry(layout)) for site in peers)
    here.run_one(prompt(1, 200))
    assert there.loaded[there.run_one(prompt(1, 200))] == 192
    there.run_one(prompt(2, 200))
    assert here.loaded[here.run_one(prompt(2, 200))] == 192
    here.check_over()
    there.check_over()


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
