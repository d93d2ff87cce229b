# SPDX-License-Identifier: Apache-2.0
"""The server's shared-memory pool: faulted in ahead of stores, and nothing beyond."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections.abc import Iterator
from multiprocessing import shared_memory

import pytest
import torch

from lmcache_rbln import block_transfer, pin_memory

MIB = 1 << 20


class Pool:
    """A shared-memory pool, as LMCache's server makes it and a worker maps it."""

    def __init__(self, size: int, name: str | None = None) -> None:
        self.size = size
        self.shm = shared_memory.SharedMemory(name=name, create=name is None, size=size)

    @property
    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self.shm.buf))

    def committed(self) -> int:
        """Bytes of memory that the pool's file has."""
        return os.stat(f"/dev/shm/{self.shm.name}").st_blocks * 512

    def field(self, name: str) -> int:
        """A field of this mapping in ``smaps``, bytes; a split mapping counts as a whole."""
        total, inside = 0, False
        with open("/proc/self/smaps") as lines:
            for line in lines:
                first = line.split()[0]
                if "-" in first:
                    inside = line.rstrip().endswith(self.shm.name)
                elif inside and first == f"{name}:":
                    total += int(line.split()[1]) << 10
        return total


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool(37 * MIB + 4096)
    yield made
    made.shm.close()
    made.shm.unlink()


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> pin_memory.RblnPinMemoryBackend:
    monkeypatch.delenv(pin_memory.PREFAULT_VARIABLE, raising=False)
    return pin_memory.RblnPinMemoryBackend()


def wait(backend: pin_memory.RblnPinMemoryBackend, pool: Pool) -> None:
    assert backend._prefaults[pool.address].wait(60)


def test_lmcache_finds_it() -> None:
    from lmcache_rbln.device_spec import RblnDeviceSpec

    spec = RblnDeviceSpec()
    assert spec.pin_memory_backend is pin_memory.RblnPinMemoryBackend
    assert spec.is_pin_supported is False


def test_all_of_the_pool_and_no_more(
    backend: pin_memory.RblnPinMemoryBackend, pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    other = Pool(8 * MIB)
    pool.shm.buf[5 * MIB] = 77
    with caplog.at_level(logging.INFO):
        assert backend.pin_memory(pool.address, pool.size) is False
    wait(backend, pool)
    assert pool.committed() == pool.size
    assert pool.field("Rss") == pool.size
    assert other.committed() == 0
    assert pool.shm.buf[5 * MIB] == 77
    assert backend.unpin_memory(pool.address) is True
    assert backend.unpin_memory(pool.address) is False
    assert pool.field("Locked") == 0
    other.shm.close()
    other.shm.unlink()


def test_one_line_says_what_is_done(
    backend: pin_memory.RblnPinMemoryBackend, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(pin_memory.logger, "info", lambda text, *values: said.append(text % values))
    backend.pin_memory(pool.address, pool.size)
    assert len(said) == 1
    assert "faulted in, in the background" in said[0]
    assert "is expected" in said[0]
    backend.unpin_memory(pool.address)


@pytest.mark.skipif(os.geteuid() != 0, reason="the memlock limit of others is too low to count on")
def test_locked_where_allowed(backend: pin_memory.RblnPinMemoryBackend, pool: Pool) -> None:
    backend.pin_memory(pool.address, pool.size)
    wait(backend, pool)
    assert pool.field("Locked") == pool.size
    backend.unpin_memory(pool.address)
    assert pool.field("Locked") == 0


def test_switched_off(
    backend: pin_memory.RblnPinMemoryBackend, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(pin_memory.PREFAULT_VARIABLE, "0")
    assert backend.pin_memory(pool.address, pool.size) is False
    assert backend.unpin_memory(pool.address) is False
    assert pool.committed() == 0


def test_stops_when_unpinned(backend: pin_memory.RblnPinMemoryBackend) -> None:
    large = Pool(1024 * MIB)
    backend.pin_memory(large.address, large.size)
    backend.unpin_memory(large.address)
    then = large.committed()
    assert then < large.size
    time.sleep(0.05)
    assert large.committed() == then
    large.shm.close()
    large.shm.unlink()


def test_stops_when_the_pool_is_unmapped(backend: pin_memory.RblnPinMemoryBackend) -> None:
    """LMCache unmaps a pool that was not registered without a word."""
    large = Pool(2048 * MIB)
    address = large.address
    backend.pin_memory(address, large.size)
    large.shm.close()
    assert backend._prefaults[address].wait(10)
    assert large.committed() < large.size
    large.shm.unlink()
    # The next pool, maybe at the same address, has a thread of its own.
    another = Pool(8 * MIB)
    backend.pin_memory(another.address, another.size)
    assert list(backend._prefaults) == [another.address]
    wait(backend, another)
    assert another.committed() == another.size
    another.shm.close()
    another.shm.unlink()


def test_a_second_worker_of_the_same_pool(
    backend: pin_memory.RblnPinMemoryBackend, pool: Pool
) -> None:
    second = Pool(pool.size, pool.shm.name)
    backend.pin_memory(pool.address, pool.size)
    backend.pin_memory(second.address, second.size)
    wait(backend, pool)
    wait(backend, second)
    assert pool.committed() == pool.size
    second.shm.close()


def test_private_memory_is_left_alone(backend: pin_memory.RblnPinMemoryBackend) -> None:
    tensor = torch.empty(64 * MIB, dtype=torch.uint8)
    assert backend.pin_memory(tensor.data_ptr(), tensor.numel()) is False
    assert backend._prefaults == {}


def test_memory_is_left_to_the_host(
    backend: pin_memory.RblnPinMemoryBackend, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(
        pin_memory.logger, "warning", lambda text, *values: said.append(text % values)
    )
    monkeypatch.setattr(pin_memory, "_RESERVE", 1 << 60)
    backend.pin_memory(pool.address, pool.size)
    wait(backend, pool)
    assert pool.committed() == 0
    assert len(said) == 1
    assert "of memory left" in said[0]


def test_lets_transfers_pass(
    backend: pin_memory.RblnPinMemoryBackend, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pin_memory, "_PATIENCE_S", 60.0)
    shared = block_transfer._shared()
    shared.running.add(threading.get_ident())
    try:
        backend.pin_memory(pool.address, pool.size)
        time.sleep(0.05)
        assert pool.committed() == 0
    finally:
        shared.running.clear()
    wait(backend, pool)
    assert pool.committed() == pool.size


def test_registered_where_torch_rbln_can(
    backend: pin_memory.RblnPinMemoryBackend, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch-rbln 0.12.0 has no such function: this is only the order of calls."""
    calls: list[tuple[object, ...]] = []
    rbln = torch.rbln
    monkeypatch.setattr(rbln, "register_host_memory", lambda *a: calls.append(a), raising=False)
    monkeypatch.setattr(
        rbln, "unregister_host_memory", lambda *a: calls.append(("undo", *a)), raising=False
    )
    held = torch.zeros(1, device="rbln")  # what a server has not
    assert backend.pin_memory(pool.address, pool.size) is True
    assert backend.unpin_memory(pool.address) is True
    assert calls == [(pool.address, pool.size), ("undo", pool.address)]
    del held
    assert pool.committed() == 0
