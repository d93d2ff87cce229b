# SPDX-License-Identifier: Apache-2.0
"""What is logged and counted, each in a process as a worker would be."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from lmcache_rbln import simulator
from lmcache_rbln.lmcache_compat.server_process import LMCacheServer
from tests.stub import interpreter

#: Two stores of four blocks, a retrieve of three, and a store that is refused.
TRANSFERS = """
import torch
import lmcache
from lmcache.lmcache_native import EngineKVFormat, TransferDirection

class Desc:
    bs = 4

layers = [torch.zeros(6, 2, 3, 1, 4, 8, dtype=torch.bfloat16, device="rbln:0") for _ in range(5)]
chunks = [torch.zeros(2, 5, 8, 24, dtype=torch.bfloat16) for _ in range(2)]

def move(direction, ids, skip=0):
    lmcache.device_ops.multi_layer_block_kv_transfer(
        layers, chunks, ids, "rbln", direction, Desc, 8,
        engine_kv_format=EngineKVFormat.NL_X_TWO_NB_NH_ONE_BS_HS, skip_prefix_n_blocks=skip)

move(TransferDirection.D2H, [0, 1, 2, 3])
move(TransferDirection.D2H, [3, 2, 1, 0])
move(TransferDirection.H2D, torch.tensor([5, 4, 3, 2]), skip=1)
try:
    move(TransferDirection.D2H, [0, 1, 2, 99])
except ValueError:
    pass
"""
#: Bytes of one block: 5 layers, K and V, 3 heads, 4 tokens of 8 bfloat16.
BLOCK = 5 * 2 * 3 * 4 * 8 * 2


def run(code: str, **env: str) -> tuple[str, str]:
    """Run code on the simulated NPU; what it printed, and what it logged."""
    done = interpreter.fresh(code, **env)
    return done.stdout, done.stderr


def ours(log: str) -> list[str]:
    """The lines of this package, without colours, as ``LEVEL message``."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", log)
    lines = (
        re.match(r"\[.*?\] LMCache (\w+): (.*) \(.*:lmcache_rbln\.\w+\)$", line)
        for line in plain.splitlines()
    )
    return [f"{line[1]} {line[2]}" for line in lines if line]


def samples(page: str) -> dict[str, float]:
    """The transfer counters of a Prometheus page, by name and direction."""
    found = re.findall(
        r'^lmcache_rbln_transfer_(\w+)_total\{.*?direction="(\w+)".*?\} (\S+)$', page, re.MULTILINE
    )
    return {f"{name} {direction}": float(value) for name, direction, value in found}


def test_one_line_at_selection() -> None:
    _, log = run("import lmcache, lmcache.v1.platform")
    (line,) = ours(log)
    assert re.fullmatch(
        r"INFO lmcache-rbln \S+ is LMCache's backend 'rbln' \(lmcache 0\.5\.\d+, torch 2\.13\.0\+cpu, "
        r"torch-rbln 0\.12\.0, 2 rbln devices\), instead of the bundled \S+ \(still there as "
        r"LMCACHE_DEVICE_BACKEND=rbln-bundled\)",
        line,
    )


def test_a_debug_line_a_transfer_and_none_a_block() -> None:
    _, log = run(TRANSFERS, LMCACHE_LOG_LEVEL="DEBUG")
    lines = [line for line in ours(log) if line.startswith("DEBUG")]
    moved = [line for line in lines if re.match(r"DEBUG (store|retrieve)", line)]
    assert [re.sub(r"[\d.]+ ms \([\d.]+ GB/s\)", "T", line) for line in moved] == [
        "DEBUG store: 4 blocks, 0.0 MiB in T",
        "DEBUG store: 4 blocks, 0.0 MiB in T",
        "DEBUG retrieve: 3 blocks, 0.0 MiB in T",
        "DEBUG store failed: ValueError: block id 99 is out of range: the KV cache has blocks 0 to 5",
    ]
    quiet = ours(run(TRANSFERS, LMCACHE_LOG_LEVEL="INFO")[1])
    assert [line for line in quiet if "block" in line] == []


def test_counters_at_the_endpoint_that_lmcache_sets_up() -> None:
    """Through the meter provider of LMCache's own function, over HTTP."""
    serve = """
    import http.client
    from lmcache.v1.mp_observability.otel_init import init_otel_metrics
    from lmcache_rbln.lmcache_compat.server_process import free_ports
    (port,) = free_ports(1)
    init_otel_metrics(prometheus_port=port)
    """
    scrape = """
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/metrics")
    print(connection.getresponse().read().decode())
    """
    out, _ = run(textwrap.dedent(serve) + TRANSFERS + textwrap.dedent(scrape))
    check(samples(out))


def test_counters_at_vllms_endpoint(tmp_path: Path) -> None:
    """vLLM gathers the files of its workers in the process that serves ``/metrics`` (vLLM 0.30)."""
    run(TRANSFERS, PROMETHEUS_MULTIPROC_DIR=str(tmp_path))
    gather = """
    from prometheus_client import CollectorRegistry, generate_latest, multiprocess
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    print(generate_latest(registry).decode())
    """
    out, _ = run(gather, PROMETHEUS_MULTIPROC_DIR=str(tmp_path))
    check(samples(out))


def test_a_metric_that_fails_fails_no_transfer(tmp_path: Path) -> None:
    """The folder for the counters is gone, and the meter raises."""
    broken = """
    from opentelemetry import metrics
    def get_meter(*_): raise OSError("no meter")
    metrics.get_meter = get_meter
    """
    folder = str(tmp_path / "gone")
    _, log = run(
        textwrap.dedent(broken) + TRANSFERS,
        PROMETHEUS_MULTIPROC_DIR=folder,
        LMCACHE_LOG_LEVEL="DEBUG",
    )
    assert sum("not counted: OSError('no meter')" in line for line in ours(log)) == 4


def test_first_transfers_at_once() -> None:
    """The counters are made once, however many threads begin."""
    threads = """
    import threading
    def store():
        start.wait()
        move(TransferDirection.D2H, [0, 1, 2, 3])
    start = threading.Barrier(8)
    workers = [threading.Thread(target=store) for _ in range(8)]
    [worker.start() for worker in workers]; [worker.join() for worker in workers]
    """
    code = TRANSFERS.partition("move(TransferDirection.D2H")[0] + textwrap.dedent(threads)
    _, log = run(code, LMCACHE_LOG_LEVEL="DEBUG")
    assert [line for line in ours(log) if "not counted" in line] == []
    assert sum(line.startswith("DEBUG store: 4 blocks") for line in ours(log)) == 8


def check(counted: dict[str, float]) -> None:
    seconds = {name: counted.pop(name) for name in [*counted] if name.startswith("seconds")}
    assert set(seconds) == {"seconds store", "seconds retrieve"}
    assert all(value > 0 for value in seconds.values())
    assert counted == {
        "blocks store": 8,
        "blocks retrieve": 3,
        "bytes store": 8 * BLOCK,
        "bytes retrieve": 3 * BLOCK,
        "failures store": 1,
    }


def test_lmcache_still_passes_tensors(ops: Any) -> None:
    """It looks for the word in the annotation of the method that it calls."""
    from lmcache.v1.multiprocess.transfer_context import base

    annotation = (
        inspect.signature(ops.multi_layer_block_kv_transfer)
        .parameters["lmcache_objects_ptrs"]
        .annotation
    )
    assert "Tensor" in str(annotation)
    accepts = [value for name, value in vars(base).items() if name.endswith("ACCEPTS_TENSORS")]
    assert all(accepts)


REGISTER = """
import sys, torch
from pathlib import Path
from lmcache_rbln.lmcache_compat.worker import StoreMode, WorkerClient
url, segment = sys.argv[1:]
caches = {f"layer.{i}": torch.zeros(2, 7, 3, 1, 16, 8, device="rbln:1") for i in range(4)}
with WorkerClient(url, model_name="telemetry") as client:
    client.register(caches, block_size=16, store_mode=StoreMode.SYNC)
    client.unregister()
    if segment:
        Path(segment).unlink()
    client.register(caches, block_size=16)
"""
GEOMETRY = (
    "INFO KV cache registered: 4 layers, kv_first, 7 blocks of 16 tokens, 3 heads of 8, float32 on "
    "rbln:1; 12288 bytes a block, 2 blocks a chunk; "
)
KINDS = "INFO KV cache registered|WARNING The LMCache server offers"


@pytest.mark.parametrize("shared", [True, False])
def test_what_was_agreed_at_registration(shared: bool) -> None:
    with LMCacheServer(chunk_size=32, pool_gb=0.05, shared_memory=shared) as server:
        done = subprocess.run(
            [sys.executable, "-c", REGISTER, server.url, str(server.shm_path or "")],
            # With the guard, a segment that cannot be mapped is refused.
            env={
                **os.environ,
                "RBLN_SIM_HOST": simulator.unique_host("telemetry"),
                "LMCACHE_RBLN_GUARD": "0",
            },
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    said = [line for line in ours(done.stderr) if re.match(KINDS, line)]
    if shared:
        agreed, fallen_back, warning = said
        assert agreed == f"{GEOMETRY}transport shared memory, stores synchronous"
        assert fallen_back == f"{GEOMETRY}transport pickle, stores asynchronous"
        assert warning.startswith("WARNING The LMCache server offers the shared memory lmcache_l1_")
        return
    assert said[0] == f"{GEOMETRY}transport pickle, stores synchronous"
    assert said[1].startswith("WARNING The LMCache server offers no shared memory")
    assert "--shm-name lmcache_kv --no-l1-use-lazy" in said[1]
