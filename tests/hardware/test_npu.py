# SPDX-License-Identifier: Apache-2.0
"""On a real NPU: ``pytest -m hardware tests/hardware``.

Without one, every test here is skipped, and nothing about hardware is validated.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from lmcache_rbln import npu, simulator
from lmcache_rbln.cli._known_kv import LAYOUTS, Geometry
from lmcache_rbln.cli._worker_process import WorkerProcess
from lmcache_rbln.lmcache_compat.server_process import LMCacheServer

pytestmark = pytest.mark.hardware

CHUNK = 1024


@pytest.fixture(scope="session")
def seen() -> Any:
    """What the host offers, asked in a process of its own; skips without a real NPU."""
    if simulator.is_active():
        pytest.skip("no NPU: this run uses the simulated one; nothing about hardware is validated")
    code = "import dataclasses, json; from lmcache_rbln import npu\n"
    code += "print(json.dumps(dataclasses.asdict(npu.status())))"
    asked = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert asked.returncode == 0, asked.stderr
    status = npu.NpuStatus(**json.loads(asked.stdout.splitlines()[-1]))
    if not status.available:
        pytest.skip(f"no NPU: {status.reason}; nothing about hardware is validated")
    return status


@pytest.fixture(scope="session")
def server(seen) -> Iterator[LMCacheServer]:
    with LMCacheServer(chunk_size=CHUNK, pool_gb=2) as server:
        yield server


@pytest.fixture(scope="session")
def worker(seen) -> Iterator[WorkerProcess]:
    with WorkerProcess("worker") as process:
        loaded = process.call("prepare")
        assert loaded["backend"] == "lmcache_rbln._rbln_device_spec.RblnDeviceSpec"
        yield process


def test_the_demo_is_exact_on_the_npu(seen, tmp_path: Path):
    report = tmp_path / "report.json"
    ran = subprocess.run(
        [sys.executable, "-m", "lmcache_rbln.cli", "demo", "--json", str(report)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert json.loads(report.read_text())["device"] == "NPU"


@pytest.mark.parametrize("store_mode", ["sync", "async"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("block_size", [16, 128, 1024])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_round_trip(server, worker, request, layout, block_size, dtype, store_mode):
    """Stored, wiped, and retrieved elsewhere, by one worker: an NPU has one process at a time."""
    heads, head_size = (1, 576) if layout == "mla" else (8, 128)
    tokens = 4 * CHUNK
    count = tokens // block_size
    geometry = Geometry(layout, 8, 2 * count + 1, heads, block_size, head_size, dtype)
    # Reversed and shifted by one block: runs of ids in neither direction alone.
    stored = [*range(count, 0, -1)]
    into = [*range(count + 1, 2 * count + 1)]
    worker.call("connect", url=server.url, model_name=request.node.name)
    worker.call("register", geometry=asdict(geometry), store_mode=store_mode)
    placed = [(block, index * block_size) for index, block in enumerate(stored)]
    worker.call("write", seed=1, placed=placed)
    token_ids = [*range(tokens)]
    wanted = {"token_ids": token_ids, "block_ids": stored, "request_id": "s"}
    assert worker.call("store", **wanted)["done"]
    worker.call("write", seed=1, placed=[])
    assert worker.call("lookup", token_ids=token_ids, request_id="r") == tokens
    wanted = {"token_ids": token_ids, "block_ids": into, "request_id": "r"}
    skip = CHUNK + block_size
    assert worker.call("retrieve", **wanted, skip_first_n_tokens=skip)["done"]
    placed = [(block, index * block_size) for index, block in enumerate(into)]
    assert worker.call("difference", seed=1, placed=placed[skip // block_size :]) == ""
    worker.call("disconnect")
