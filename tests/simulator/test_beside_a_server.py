# SPDX-License-Identifier: Apache-2.0
"""A real ``lmcache server`` beside a worker that holds the only NPU never opens it."""

from __future__ import annotations

import urllib.request
from dataclasses import asdict

from lmcache_rbln import simulator
from lmcache_rbln.cli._worker_process import WorkerProcess
from lmcache_rbln.lmcache_compat.server_process import LMCacheServer
from tests.e2e.e2e_workers import CHUNK, Worker, scattered, small


def test_the_server_leaves_the_npu_alone(background, script, tmp_path):
    host = simulator.unique_host()
    environment = simulator.environment(npus=1, host=host)
    holder = background(
        """
        import sys
        from native import Runtime
        assert Runtime().register(0, 0) == 0
        print("ready", flush=True)
        sys.stdin.read()
        """,
        host=host,
    )
    log = tmp_path / "server.log"
    server = LMCacheServer(chunk_size=CHUNK, pool_gb=0.05, environment=environment, log_path=log)
    with server:
        # Started while the NPU was held. Had it opened the NPU later, the worker could not.
        for page in ("healthcheck", "status"):
            with urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}/{page}") as answer:
                assert answer.status == 200
        holder.kill()
        geometry = small("blocks_first")
        with WorkerProcess("worker", environment=environment) as process:
            process.call("prepare")
            process.call("connect", url=server.url, model_name="model")
            process.call("register", geometry=asdict(geometry), store_mode="auto")
            worker = Worker(process, server, geometry, tokens=list(range(2 * CHUNK)))
            stored, retrieved = scattered(geometry, 2 * CHUNK)
            worker.write(stored)
            assert worker.store(stored)
            assert worker.lookup() == 2 * CHUNK
            worker.write([])
            assert worker.retrieve(retrieved)
            assert worker.difference(retrieved) == ""
            process.call("disconnect")
            held = script("from native import Runtime; print(Runtime().register(0, 0))", host=host)
            assert f"(pid {process.pid})" in held.stderr
        # A process that asks the runtime to open an NPU that is held is told so on stderr.
        assert "rbln_register_device_id" not in log.read_text()
