# SPDX-License-Identifier: Apache-2.0
"""Shared memory that goes away: the worker lives, failures are failures, and then all is well."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict

import pytest

from lmcache_rbln import simulator
from lmcache_rbln.cli._worker_process import WorkerProcess
from tests.faults.rig import BLOCKS, CHUNKS, INTO, expect_exact, small, token_ids


def exact(writer, reader, content):
    writer.write(content, BLOCKS)
    assert writer.store(content, BLOCKS, chunks=CHUNKS) is True
    expect_exact(reader, content)


def test_server_killed_and_restarted_with_live_views(start, peer):
    server = start()
    writer, reader = peer(server, timeout=4), peer(server, timeout=4)
    exact(writer, reader, 1)
    views = writer.client.transfer_context.engine_driven_context._build_slot_tensors(
        [{"offset": 0, "length": 12288, "shape": [2, 3, 64, 16], "dtype": "bfloat16"}]
    )
    server.kill()
    writer.write(2, BLOCKS)
    assert (
        writer.client.submit_store(token_ids(2, CHUNKS), BLOCKS, request_id="d").result(20) is False
    )
    assert writer.difference(2, BLOCKS) == ""
    views[0].fill_(1)  # What a late thread would do.
    server.start()
    # The new server does not know these workers: nothing is stored, nothing retrieved.
    assert (
        writer.client.submit_store(token_ids(2, CHUNKS), BLOCKS, request_id="e").result(20) is False
    )
    for worker in (writer, reader):
        worker.client.unregister()
        worker.register()
    assert reader.hits(1, CHUNKS) == 0
    exact(writer, reader, 3)
    exact(reader, writer, 2)


def test_segment_unlinked(start, peer):
    server = start()
    writer, reader = peer(server), peer(server)
    server.shm_path.unlink()
    # Those who have it mapped share it still.
    exact(writer, reader, 1)
    # Who comes now cannot map it; LMCache would go on with a transport that loses everything.
    with pytest.raises(RuntimeError, match="same /dev/shm"):
        peer(server)
    exact(reader, writer, 2)


def test_a_worker_without_the_guard_that_cannot_map_the_segment(start, peer):
    """What LMCache's fallback does, and that a guarded server at least stores what it is sent."""
    served = {}
    for guard in ("0", "1"):
        server = start(environment={**os.environ, "LMCACHE_RBLN_GUARD": guard})
        reader = peer(server)
        hidden = server.shm_path.rename(server.shm_path.with_name("hidden_" + server.shm_path.name))
        try:
            environment = simulator.environment(
                {**os.environ, "LMCACHE_RBLN_GUARD": "0"}, host=simulator.unique_host("pickling")
            )
            with WorkerProcess("pickling", environment=environment) as worker:
                worker.call("connect", url=server.url, model_name=reader.client.model_name)
                agreed = worker.call("register", geometry=asdict(small("kv_first")))
                assert agreed["transport"] == "pickle"
                worker.call("write", seed=1, placed=reader.placed(BLOCKS))
                stored = worker.call(
                    "store", token_ids=token_ids(1, CHUNKS), block_ids=BLOCKS, request_id="s"
                )
                assert stored["done"] is True
                worker.call("disconnect")
            reader.write(0, [])
            assert reader.retrieve(1, INTO, chunks=CHUNKS) is True
            served[guard] = reader.difference(1, INTO)
        finally:
            hidden.unlink()
    assert served["0"] != "", "LMCache's server stores what a pickling worker sends: obsolete"
    assert served["1"] == ""


def test_segment_cut_short(start):
    server = start()
    environment = simulator.environment(host=simulator.unique_host("cut"))
    with WorkerProcess("cut", environment=environment) as worker:
        worker.call("connect", url=server.url, model_name="cut", timeout=10)
        worker.call("register", geometry=asdict(small("kv_first")))

        def store(content):
            return worker.call(
                "store",
                token_ids=token_ids(content, CHUNKS),
                block_ids=BLOCKS,
                request_id=f"s{content}",
            )["done"]

        worker.call("write", seed=1, placed=[(b, 16 * b) for b in BLOCKS])
        assert store(1) is True
        os.truncate(server.shm_path, 4096)
        assert store(2) is False
        assert "cut short" in worker.log_tail(200)
        assert worker.call("lookup", token_ids=token_ids(1, CHUNKS), request_id="r")
        done = worker.call(
            "retrieve", token_ids=token_ids(1, CHUNKS), block_ids=INTO, request_id="r"
        )
        assert done["done"] is False
        server.kill()
        server.stop()
        server.start()
        worker.call("connect", url=server.url, model_name="cut", timeout=10)
        worker.call("register", geometry=asdict(small("kv_first")))
        worker.call("write", seed=1, placed=[(b, 16 * b) for b in BLOCKS])
        assert store(1) is True


@pytest.mark.parametrize("ending", ["exit", "kill"])
def test_a_workers_end_leaves_the_servers_segment(start, peer, ending):
    server = start()
    environment = simulator.environment(host=simulator.unique_host("end"))
    with WorkerProcess("leaving", environment=environment) as worker:
        worker.call("connect", url=server.url, model_name="end")
        worker.call("register", geometry=asdict(small("kv_first")))
        if ending == "kill":
            worker.kill()
        else:
            worker.stop()
    time.sleep(1)  # A resource tracker that means to unlink does so after its process.
    assert server.shm_path.exists()
    exact(peer(server), peer(server), 1)


FULL = """
import sys
from lmcache_rbln import simulator
simulator.activate(npus=1, host=simulator.unique_host("full"))
from lmcache_rbln.lmcache_compat.server_process import LMCacheServer
from tests.faults.rig import CHUNK, PER_CHUNK, Peer, small
blocks = list(range(3 * PER_CHUNK))
pool = 64 << 20
with LMCacheServer(chunk_size=CHUNK, pool_gb=pool / 2**30, arguments=["--max-workers", "2"]) as server:
    with Peer(server, "full", small("kv_first")) as peer:
        filler = open("/dev/shm/filler", "wb", buffering=0)
        try:
            while True:
                filler.write(bytes(1 << 16))
        except OSError:
            pass
        outcomes = []
        for content in range(1, 40):
            peer.write(content, blocks)
            outcomes.append(peer.store(content, blocks, chunks=3))
            assert peer.hits(content, 3) == (3 if outcomes[-1] else 0)
        print("while full:", outcomes.count(True), "stored,", outcomes.count(False), "failed")
        filler.truncate(0)
        peer.write(100, blocks)
        assert peer.store(100, blocks, chunks=3) is True
        assert peer.retrieve(100, blocks, chunks=3) is True
        assert peer.difference(100, blocks) == ""
        print("afterwards: exact")
"""


def test_dev_shm_full():
    """A /dev/shm of its own, smaller than the pool needs: a namespace that only this test sees."""
    unshare = shutil.which("unshare")
    mount = "mount -t tmpfs -o size=96m tmpfs /dev/shm"
    if (
        unshare is None
        or subprocess.run(
            [unshare, "-m", "sh", "-c", mount], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("needs the right to mount a tmpfs of its own (unshare -m)")
    done = subprocess.run(
        [unshare, "-m", "sh", "-c", f'{mount} && exec "$0" -c "$1"', sys.executable, FULL],
        capture_output=True,
        check=False,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "afterwards: exact" in done.stdout
    print(done.stdout[-200:])
