# SPDX-License-Identifier: Apache-2.0
"""Copies: what is counted, and what is refused before a byte is moved."""

from __future__ import annotations

import ctypes

import pytest
import torch

from lmcache_rbln import simulator
from tests.simulator.native import FAILURE, INVALID, SUCCESS

KIB = 1 << 10
MIB = 1 << 20


class Buffer:
    """Host memory and its address."""

    def __init__(self, size: int, byte: int = 0) -> None:
        self.memory = ctypes.create_string_buffer(bytes([byte]) * size, size)
        self.address = ctypes.addressof(self.memory)

    @property
    def raw(self) -> bytes:
        return self.memory.raw


@pytest.fixture
def device_memory(runtime):
    address = runtime.malloc(16 * MIB)
    assert address
    yield address
    assert runtime.free(address) == SUCCESS


def test_counters():
    simulator.reset_counters()
    host = torch.arange(1000, dtype=torch.int32)
    device = host.to("rbln")
    other = device.clone()
    assert torch.equal(other.cpu(), host)
    torch._foreach_copy_(list(device.split(100)), list(host.split(100)))
    counted = simulator.counters()
    assert counted["h2v"] == {"submissions": 2, "entries": 11, "bytes": 8000}
    assert counted["v2v"] == {"submissions": 1, "entries": 1, "bytes": 4000}
    assert counted["v2h"] == {"submissions": 1, "entries": 1, "bytes": 4000}
    assert counted["borrow"] == {"submissions": 0, "entries": 0, "bytes": 0}
    assert [counted["calls"][kind] for kind in ("h2v", "v2v", "v2h", "malloc")] == [2, 1, 1, 2]
    torch.rbln.synchronize()
    assert simulator.counters()["synchronize"] == 1
    simulator.reset_counters()
    assert simulator.counters()["h2v"] == {"submissions": 0, "entries": 0, "bytes": 0}


def test_host_fallback_is_a_borrow():
    simulator.reset_counters()
    device = torch.arange(10, dtype=torch.int32).to("rbln")
    doubled = device + device  # the host does this for torch-rbln
    assert simulator.counters()["borrow"]["submissions"] >= 2
    assert doubled.cpu().tolist() == list(range(0, 20, 2))


@pytest.mark.parametrize("direction", ["h2v", "v2h", "v2v"])
def test_bad_single_copies(runtime, device_memory, capfd, direction):
    buffer = Buffer(64, 1)
    good = {"h": buffer.address, "v": device_memory}
    source, destination = good[direction[0]], good[direction[2]] + (64 if direction == "v2v" else 0)
    bad = {"h": [0, device_memory], "v": [0, 12345, buffer.address, device_memory + 16 * MIB]}
    cases = [(each, destination, 8) for each in bad[direction[0]]]
    cases += [(source, each, 8) for each in bad[direction[2]]]
    cases += [(source, destination, 0), (source, destination, 17 * MIB)]
    for case in cases:
        assert runtime.copy(direction, *case) == INVALID, case
        assert runtime.copy_async(direction, *case) == INVALID, case
        assert runtime.bulk(direction, [(source, destination, 8), case]) == INVALID, case
        lines = capfd.readouterr().err.splitlines()
        assert len(lines) == 3
        assert all(f"rbln_memcpy_{direction}" in line for line in lines)
    assert runtime.copy(direction, source, destination, 64) == SUCCESS


def test_a_bad_entry_stops_a_bulk_call_before_it_starts(runtime, device_memory):
    old, new, seen = Buffer(256, 1), Buffer(256, 2), Buffer(256)
    assert runtime.copy("h2v", old.address, device_memory, 256) == SUCCESS
    ops = [(new.address, device_memory, 64), (new.address, 4096, 64)]
    assert runtime.bulk("h2v", ops) == INVALID
    assert runtime.copy("v2h", device_memory, seen.address, 256) == SUCCESS
    assert seen.raw == old.raw


@pytest.mark.parametrize("direction", ["h2v", "v2h", "v2v"])
@pytest.mark.parametrize("gap", [-64, -63, -1, 0, 1, 63, 64])
def test_overlapping_destinations(runtime, device_memory, capfd, direction, gap):
    host = Buffer(4096)
    source = host.address if direction == "h2v" else device_memory + MIB
    destination = host.address if direction == "v2h" else device_memory
    ops = [
        (source, destination + 1024, 64),
        (source + 64, destination + 2048, 64),
        (source + 128, destination + 1024 + gap, 64),
    ]
    overlap = abs(gap) < 64
    assert runtime.bulk(direction, ops) == (INVALID if overlap else SUCCESS)
    assert ("destinations of entries" in capfd.readouterr().err) == overlap


@pytest.mark.parametrize("direction", ["h2v", "v2h"])
def test_bulk_limit(runtime, device_memory, capfd, direction):
    host = Buffer(13 * MIB)

    def bulk(entries: int, size: int) -> int:
        ops = [(host.address + i * size, device_memory + i * size, size) for i in range(entries)]
        return runtime.bulk(
            direction, ops if direction == "h2v" else [(d, h, n) for h, d, n in ops]
        )

    assert bulk(24, 512 * KIB) == SUCCESS  # what the vendor measured to pass: 24 entries, 12 MiB
    assert bulk(25, KIB) == FAILURE
    assert bulk(12, MIB + 64) == FAILURE
    assert capfd.readouterr().err.count("timed out") == 2
    assert bulk(24, KIB) == SUCCESS  # the device goes on


def test_bulk_limit_setting(script):
    script(
        """
        import ctypes
        from native import FAILURE, SUCCESS, Runtime
        runtime = Runtime()
        runtime.register(0, 0)
        device, host = runtime.malloc(1 << 21), ctypes.create_string_buffer(1 << 21)
        at = ctypes.addressof(host)
        assert runtime.bulk("h2v", [(at + i, device + i, 1) for i in range(3)]) == SUCCESS
        assert runtime.bulk("h2v", [(at + i, device + i, 1) for i in range(4)]) == FAILURE
        assert runtime.bulk("h2v", [(at, device, 1 << 20)]) == SUCCESS
        assert runtime.bulk("h2v", [(at, device, (1 << 20) + 1)]) == FAILURE
        """,
        bulk_limit="3:1",
    )


def test_bulk_within_the_device(runtime, device_memory):
    # The limits of a bulk host copy are not its own.
    far = device_memory + 8 * MIB
    ops = [(device_memory + i * 8 * KIB, far + i * 8 * KIB, 8 * KIB) for i in range(1024)]
    assert runtime.bulk("v2v", ops) == SUCCESS
    ops = [(device_memory + i, far + i, 1) for i in range(1025)]
    assert runtime.bulk("v2v", ops) == INVALID
    assert runtime.bulk("v2v", []) == INVALID


def test_torch_stays_within_the_limits():
    """The genuine torch-rbln splits what is larger than its own, lower, limits."""
    host = torch.randint(0, 255, (100, 300_000), dtype=torch.uint8)
    device = torch.empty_like(host, device="rbln")
    simulator.reset_counters()
    torch._foreach_copy_(list(device.unbind()), list(host.unbind()))
    assert torch.equal(device.cpu(), host)
    assert simulator.counters()["h2v"]["entries"] == 100


def test_devices_do_not_mix(runtime, device_memory, capfd):
    other = runtime.malloc(4096, device=1)
    host = Buffer(4096)
    assert runtime.copy("v2v", device_memory, other, 64) == INVALID
    assert "source is on rbln:0, destination on rbln:1" in capfd.readouterr().err
    ops = [(host.address, device_memory, 64), (host.address + 64, other, 64)]
    assert runtime.bulk("h2v", ops) == INVALID
    assert "entry 1 is on rbln:1, entry 0 on rbln:0" in capfd.readouterr().err
    assert runtime.free(other) == SUCCESS


def test_torch_copies_across_devices():
    tensor = torch.arange(1000)
    assert torch.equal(tensor.to("rbln:0").to("rbln:1").cpu(), tensor)


def test_without_moving_bytes(script):
    script(
        """
        import torch
        from lmcache_rbln import simulator
        device = torch.zeros(100, dtype=torch.uint8, device="rbln")
        device.copy_(torch.ones(100, dtype=torch.uint8))
        assert not simulator.host_view(device).any()
        out = torch.full((100,), 5, dtype=torch.uint8)
        out.copy_(device)
        assert (out == 5).all()
        assert simulator.counters()["h2v"]["bytes"] == simulator.counters()["v2h"]["bytes"] == 100
        del device
        """,
        copy=False,
    )
