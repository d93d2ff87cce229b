# SPDX-License-Identifier: Apache-2.0
"""The command ``lmcache-rbln demo``: what it proves, and that it can fail."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lmcache_rbln import simulator
from lmcache_rbln.cli import _devices, demo
from lmcache_rbln.lmcache_compat.server_process import LMCacheServer


@pytest.fixture
def quick(monkeypatch, environments) -> None:
    """The demo with small caches, on NPUs that no other worker holds."""
    base = simulator.environment(environments[0], npus=2, host=simulator.unique_host())
    del base["RBLN_DEVICES"]
    devices = _devices.Devices(
        "simulated NPU", "a test", _devices.worker_environments(base, 2), base
    )
    monkeypatch.setattr(demo, "find_devices", lambda: devices)
    small = {
        name: dataclasses.replace(geometry, layers=2) for name, geometry in demo._GEOMETRIES.items()
    }
    monkeypatch.setattr(demo, "_GEOMETRIES", small)
    monkeypatch.setattr(demo, "_POOL_GB", 0.2)


def run(tmp_path: Path) -> tuple[int, dict]:
    report = tmp_path / "report.json"
    code = demo.run(argparse.Namespace(json=report))
    return code, json.loads(report.read_text())


def test_every_byte_is_exact(quick, tmp_path, capsys):
    code, report = run(tmp_path)
    assert code == 0
    assert report["exact"] is True
    assert report["device"] == "simulated NPU"
    assert report["error"] == ""
    assert [one["layout"] for one in report["layouts"]] == ["blocks-first", "K/V-first", "MLA"]
    for one in report["layouts"]:
        assert one["verdict"] == "exact"
        assert one["transport"] == "shared memory"
        assert one["store_gbps"] > 0
        assert one["retrieve_gbps"] > 0
    # 8 chunks of 256 tokens, 2 layers, K and V of 8 heads of 128 in bfloat16.
    assert report["layouts"][0]["mib"] == 8 * 256 * 2 * 2 * 8 * 128 * 2 / 2**20
    assert "Every byte is exact" in capsys.readouterr().out


def turn_bytes(segment: Path) -> None:
    with segment.open("r+b") as pool:
        content = bytearray(pool.read())
        content[100::4096] = bytes(byte ^ 0x10 for byte in content[100::4096])
        pool.seek(0)
        pool.write(content)


def test_wrong_bytes_fail_it(quick, tmp_path, monkeypatch, capsys):
    """One byte in each page of the server's pool is turned between a store and the retrieve.

    Here with one NPU, which the workers hold one after the other.
    """
    devices = demo.find_devices()
    shared = dataclasses.replace(devices, environments=(devices.environments[0],) * 2)
    monkeypatch.setattr(demo, "find_devices", lambda: shared)
    servers: list[LMCacheServer] = []
    start = LMCacheServer.start

    def watched(self, *arguments):
        servers.append(self)
        return start(self, *arguments)

    look_up = demo._Round.retrieve

    def corrupted(self, *arguments):
        if self.name != "K/V-first":
            return look_up(self, *arguments)
        turn_bytes(servers[0].shm_path)
        result = look_up(self, *arguments)
        turn_bytes(servers[0].shm_path)  # Back again.
        return result

    monkeypatch.setattr(LMCacheServer, "start", watched)
    monkeypatch.setattr(demo._Round, "retrieve", corrupted)
    code, report = run(tmp_path)
    assert code == 1
    assert report["exact"] is False
    assert [one["error"] == "" for one in report["layouts"]] == [True, False, True]
    assert "bytes are wrong; the first: layer 0" in report["layouts"][1]["verdict"]
    assert "The demo failed" in capsys.readouterr().out


def test_a_worker_that_dies_fails_it(quick, tmp_path, monkeypatch, capsys):
    store = demo._Round.store

    def killed(self, worker, *arguments):
        worker.kill()
        return store(self, worker, *arguments)

    monkeypatch.setattr(demo._Round, "store", killed)
    code, report = run(tmp_path)
    assert code == 1
    assert report["exact"] is False
    assert report["layouts"] == []
    assert "storing worker: connect: died of signal 9" in report["error"]
    # The last lines of both logs are there to look at.
    assert "The server's log ends" in report["error"]


def test_another_backend_is_no_proof(quick, tmp_path, monkeypatch):
    devices = demo.find_devices()
    pinned = tuple(
        {**one, "LMCACHE_DEVICE_BACKEND": "rbln-bundled"} for one in devices.environments
    )
    monkeypatch.setattr(
        demo, "find_devices", lambda: dataclasses.replace(devices, environments=pinned)
    )
    code, report = run(tmp_path)
    assert code == 1
    assert "LMCache chose the backend lmcache.v1.platform" in report["error"]


def test_a_report_that_cannot_be_written_is_said_at_once(tmp_path, capsys):
    assert demo.run(argparse.Namespace(json=tmp_path / "missing" / "report.json")) == 2
    assert "there is no folder" in capsys.readouterr().out


def children(pid: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(status.parent.name))
    return found


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_nothing_is_left_when_it_is_ended(number, code, environments):
    environment = dict(environments[0])
    del environment["RBLN_DEVICES"]
    started = subprocess.Popen(
        # Ctrl-C is ignored, and that inherited, where the tests are a shell's background job.
        ["env", "--default-signal=INT", sys.executable, "-m", "lmcache_rbln.cli", "demo"],
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    # The server and both workers, wherever they have got to.
    deadline = time.monotonic() + 120
    while len(running := children(started.pid)) < 3 or not all(
        "lmcache_rbln" in Path(f"/proc/{pid}/cmdline").read_text() for pid in running
    ):
        assert time.monotonic() < deadline
        assert started.poll() is None
        time.sleep(0.05)
    time.sleep(2)
    started.send_signal(number)
    assert started.wait(60) == code
    deadline = time.monotonic() + 60
    while any(_lives(pid) for pid in running):
        assert time.monotonic() < deadline, "a process outlived the demo"
        time.sleep(0.1)
    assert not list(Path("/dev/shm").glob(f"lmcache_l1_pool_rbln_{started.pid}_*"))


def _lives(pid: int) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/exe") != ""
    except OSError:
        return False
