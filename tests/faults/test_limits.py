# SPDX-License-Identifier: Apache-2.0
"""Much, long and full: a pool smaller than what goes through it, thousands of transfers, no memory."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from lmcache_rbln.cli._known_kv import Geometry
from lmcache_rbln.lmcache_compat.server_process import LMCacheServer
from tests.faults.matrix import Resources
from tests.faults.rig import CHUNK, PER_CHUNK, Peer, l1, small

MIB = 1 << 20


def resident(pid: int) -> int:
    """Bytes of a process's memory, its share of shared memory included."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) << 10


@pytest.mark.timeout(1200)
def test_ten_thousand_transfers_leave_nothing():
    chunks, count = 1, int(os.environ.get("FAULTS_TRANSFERS", "5000"))
    blocks = list(range(PER_CHUNK))
    with (
        LMCacheServer(chunk_size=CHUNK, pool_gb=8 * MIB / 2**30) as server,
        Peer(server, "long", small("kv_first")) as peer,
    ):
        peer.write(1, blocks)
        # A store that finds no room while LMCache evicts in the background is skipped: a miss.
        outcomes: Counter[bool | None] = Counter()
        for content in range(count):
            if content == count // 5:
                before, memory = Resources.now(), resident(os.getpid())
                server_memory = resident(server.pid)
            assert peer.store(content, blocks, chunks=chunks) is True
            outcomes[peer.retrieve(content, blocks, chunks=chunks)] += 1
        assert outcomes[False] == 0
        assert outcomes[True] > 0.7 * count
        assert peer.difference(1, blocks) == ""
        assert Resources.now().leaked_since(before) == ""
        after = l1(server)
        assert (after.write_locked, after.read_locked) == (0, 0)
        # A byte lost in each of 8,000 transfers is 8 KB; an object, a megabyte.
        assert resident(os.getpid()) - memory < 16 * MIB
        # LMCache keeps statistics and sessions of its own.
        assert resident(server.pid) - server_memory < 64 * MIB


@pytest.mark.timeout(1200)
def test_eight_gib_through_a_pool_of_one():
    import torch

    tokens = 1024
    geometry = Geometry("blocks_first", 62, 3, 8, tokens, 128)
    with LMCacheServer(chunk_size=tokens, pool_gb=1.0) as server:
        available = int(re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())[1])
        if available < 4 << 20:
            pytest.skip("needs 4 GiB of memory")
        one = torch.randint(0, 256, (*geometry.layer_shape[:-1], 256), dtype=torch.uint8)
        layers = {
            f"layer.{index}": one.roll(index, -1).view(torch.bfloat16).to("rbln")
            for index in range(geometry.layers)
        }
        from lmcache_rbln.lmcache_compat.worker import WorkerClient

        with WorkerClient(server.url, model_name="large", timeout=120) as client:
            client.register(layers, block_size=tokens)
            block_nbytes = geometry.layers * one[0].numel()
            rounds = -(-(8 << 30) // block_nbytes)
            memory = 0
            for content in range(rounds):
                if content == rounds // 4:
                    memory = resident(os.getpid())
                names = [content * 10_000_019 + position for position in range(tokens)]
                store_until_served(client, names, content % 2, f"s{content}")
            assert resident(os.getpid()) - memory < 64 * MIB
            assert client.lookup(names, request_id="last") == tokens
            assert client.retrieve(names, [2], request_id="last") is True
            last = (rounds - 1) % 2
            for index, layer in enumerate(layers.values()):
                found = layer.cpu().view(torch.uint8)
                expected = one.roll(index, -1)
                assert torch.equal(found[2], expected[last])
                assert torch.equal(found[:2], expected[:2])


def store_until_served(client, names, block, request):
    """LMCache evicts in the background, skips what finds no room meanwhile, and reports success."""
    deadline = time.monotonic() + 60
    for attempt in itertools.count():
        assert time.monotonic() < deadline, "the server found no room"
        name = f"{request}/{attempt}"
        assert client.store(names, [block], request_id=name) is True
        found = client.lookup(names, request_id=name)
        if found:
            client.free_lookup(names, request_id=name)
        client.end_session(name)
        if found:
            return
        time.sleep(0.1)


def run(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        check=False,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


DEVICE_FULL = """
from lmcache_rbln import simulator
simulator.activate(npus=1, memory_gb=0.0625, host=simulator.unique_host("full"))
import torch
from lmcache_rbln.lmcache_compat.server_process import LMCacheServer
from tests.faults.rig import CHUNK, PER_CHUNK, Peer, small
blocks = list(range(1, 3 * PER_CHUNK + 1))
with LMCacheServer(chunk_size=CHUNK, pool_gb=0.05) as server:
    for layout in ("kv_first", "blocks_first", "mla"):
        with Peer(server, layout, small(layout, blocks=26)) as peer:
            filler = []
            for size in (1 << 20, 1 << 12):
                try:
                    while True:
                        filler.append(torch.empty(size, dtype=torch.uint8, device="rbln"))
                except RuntimeError:
                    pass
            outcomes = []
            for content in range(1, 6):
                peer.write(content, blocks)
                done = peer.store(content, blocks, chunks=3)
                assert peer.hits(content, 3) == (3 if done else 0)
                outcomes.append(done)
                if done:
                    peer.write(0, [])
                    if peer.retrieve(content, blocks[::-1], chunks=3):
                        assert peer.difference(content, blocks[::-1]) == ""
            filler.clear()
            peer.write(9, blocks)
            assert peer.store(9, blocks, chunks=3) is True
            peer.write(0, [])
            assert peer.retrieve(9, blocks, chunks=3) is True
            assert peer.difference(9, blocks) == ""
            print(layout, "while full:", outcomes, "afterwards: exact")
"""


def test_device_memory_full():
    assert run(DEVICE_FULL).count("afterwards: exact") == 3


HOST_FULL = """
import resource
from lmcache_rbln import simulator
simulator.activate(npus=1, host=simulator.unique_host("host"))
from lmcache_rbln.lmcache_compat.server_process import LMCacheServer
from tests.faults.rig import CHUNK, PER_CHUNK, Peer, small
blocks = list(range(3 * PER_CHUNK))
with LMCacheServer(chunk_size=CHUNK, pool_gb=0.05) as server:
    with Peer(server, "host", small("kv_first"), mode="sync") as peer:
        peer.write(1, blocks)
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        # Room for what Python needs, not for a staging buffer.
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), resource.RLIM_INFINITY))
        done = peer.store(1, blocks, chunks=3)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert done is False, done
        assert peer.hits(1, 3) == 0
        assert peer.store(1, blocks, chunks=3) is True
        peer.write(0, [])
        assert peer.retrieve(1, blocks, chunks=3) is True
        assert peer.difference(1, blocks) == ""
        print("afterwards: exact")
"""


def test_host_memory_full():
    """No memory for staging: the store fails, with LMCache's lines in the log, and the next works."""
    assert "afterwards: exact" in run(HOST_FULL)
