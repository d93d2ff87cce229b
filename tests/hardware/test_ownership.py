# SPDX-License-Identifier: Apache-2.0
"""Who opens an NPU, and who does not; by the device nodes that processes have open.

The simulator's answers to these questions are assumptions (docs/hardware-validation.md).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from lmcache_rbln import simulator
from lmcache_rbln.cli import _npu_holders
from lmcache_rbln.lmcache_compat.server_process import LMCacheServer

pytestmark = pytest.mark.hardware

#: Says when it is ready, and stays until its input ends.
HOLD = "import sys, torch; {use}; print('ready', flush=True); sys.stdin.read()"


@pytest.fixture(autouse=True)
def _on_an_npu() -> None:
    if simulator.is_active() or not _npu_holders.device_nodes():
        pytest.skip("no NPU: no /dev/rbln node; nothing about hardware is validated")


@pytest.fixture
def using() -> Iterator[subprocess.Popen[str]]:
    """A process that uses its first NPU."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD.format(use="torch.zeros(1, device='rbln:0')")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.communicate("")


def test_asking_opens_none() -> None:
    use = "from lmcache_rbln import npu; assert npu.status().available"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD.format(use=use)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        holders = _npu_holders.of_nodes()
        process.communicate("")
    assert process.pid not in {holder.pid for holder in holders}


def test_the_holder_is_named(using: subprocess.Popen[str]) -> None:
    assert using.pid in {holder.pid for holder in _npu_holders.of_nodes()}


def test_a_second_process_is_refused_and_doctor_says_who_holds_it(
    using: subprocess.Popen[str],
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lmcache_rbln.cli", "doctor", "--json", "--open", "--no-engine"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert done.returncode == 1
    assert f"pid {using.pid}" in checks["NPUs in use"]["found"]
    assert "opening failed" in checks["NPUs in use"]["found"]


def test_a_server_beside_a_worker_opens_none(using: subprocess.Popen[str]) -> None:
    with LMCacheServer(chunk_size=1024, pool_gb=0.5) as server:
        assert server.healthy()
        assert server.pid not in {holder.pid for holder in _npu_holders.of_nodes()}
