# SPDX-License-Identifier: Apache-2.0
"""Tiny models, their references, and a server for the engines under test."""

import functools
import http.client
import importlib.util
import json
import time

import pytest


def pytest_collection_modifyitems(items):
    """Without vLLM-RBLN there is no engine to test."""
    if importlib.util.find_spec("vllm_rbln") is None:
        absent = pytest.mark.skip(reason="vllm-rbln is not installed")
        for item in items:
            if item.get_closest_marker("engine"):
                item.add_marker(absent)
    for item in items:
        if item.get_closest_marker("engine"):
            # Engines have a watchdog of their own, which tells more.
            item.add_marker(pytest.mark.timeout(1200))


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """`model(name)`: the folder of a tiny model, made at its first use."""
    from tests.engine import models

    return functools.lru_cache(maxsize=None)(
        lambda name: models.make(name, tmp_path_factory.mktemp("models") / name)
    )


@pytest.fixture(scope="session")
def reference(model):
    """`reference(name, dtype="float32", fp8_cache=False)`: transformers' own model."""
    import torch

    from tests.engine import models

    @functools.cache
    def make(name, dtype="float32", fp8_cache=False):
        return models.Reference(model(name), getattr(torch, dtype), fp8_cache)

    return make


class Server:
    """A real `lmcache server`, and what it holds.

    Args:
        process: what runs it, with a `pid`.
        log: the file it writes to.
        port, http_port: where it listens, on 127.0.0.1.
    """

    def __init__(self, process, log, port, http_port):
        self.process = process
        self.pid = process.pid
        self.log = log
        self.port = port
        self._http_port = http_port

    def chunks(self):
        """How many chunks can be hit: those that are written."""
        connection = http.client.HTTPConnection("127.0.0.1", self._http_port, timeout=30)
        connection.request("GET", "/status")
        status = json.loads(connection.getresponse().read())
        connection.close()
        l1 = status["storage_manager"]["l1_manager"]
        return l1["total_object_count"] - l1["write_locked_count"]

    def wait_for(self, count, seconds=60):
        """Stores are asynchronous; wait until `count` chunks are there."""
        deadline = time.monotonic() + seconds
        while (held := self.chunks()) < count:
            assert time.monotonic() < deadline, f"{held} of {count} chunks stored in {seconds} s"
            time.sleep(0.1)

    def connector(self, name="RBLNLMCacheConnectorV1", **settings):
        """vLLM's `kv_transfer_config` for an engine that uses this server."""
        by_path = {"kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector"}
        return {
            "kv_connector": name,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            **(by_path if name == "LMCacheMPConnector" else {}),
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": self.port,
                # While a lookup is pending vLLM's processes spin. On two cores the server was
                # seen without a core for 17 s; after 10 s, the default, it counts as lost. Not
                # more than a third of its --worker-reap-timeout-seconds.
                "lmcache.mp.heartbeat_interval": 40.0,
                **settings,
            },
        }


@pytest.fixture
def new_server(tmp_path):
    """`new_server(chunk_size=64)` starts a server; all are stopped after the test."""
    from lmcache_rbln.lmcache_compat.server_process import LMCacheServer
    from tests.engine import processes

    started = []

    def start(chunk_size=64, pool_gb=0.5):
        log = tmp_path / f"server{len(started)}.log"
        environment = processes.environment(tmp_path)
        # The server has no NPU; torch-rbln is for the workers.
        environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        process = LMCacheServer(
            chunk_size=chunk_size, pool_gb=pool_gb, environment=environment, log_path=log
        )
        started.append(process.start())
        return Server(process, log, int(process.url.rpartition(":")[2]), process.http_port)

    yield start
    for process in started:
        process.stop()


@pytest.fixture
def server(new_server):
    """A server with chunks of 64 tokens."""
    return new_server()
