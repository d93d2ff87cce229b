# SPDX-License-Identifier: Apache-2.0
"""Staging: bounded, never shared, given back; and the threads that help."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from lmcache_rbln import simulator, staging
from lmcache_rbln.helper_threads import HelperThreads
from lmcache_rbln.staging import HND_BUFFER, Buffers, Staging

MIB = 1 << 20


def host_buffers(count: int, nbytes: int = 4096) -> Buffers:
    return Buffers(count, nbytes, lambda size: torch.empty(size, dtype=torch.uint8))


def test_no_more_than_count_at_once_and_never_shared() -> None:
    buffers = host_buffers(3)
    held: set[int] = set()
    most = 0
    shared = False
    lock = threading.Lock()

    def work() -> None:
        nonlocal most, shared
        for _ in range(50):
            with buffers.lease() as buffer:
                address = buffer.whole(torch.uint8, 1).data_ptr()
                with lock:
                    shared |= address in held
                    held.add(address)
                    most = max(most, len(held))
                time.sleep(0.0002)
                with lock:
                    held.discard(address)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not shared
    assert most == 3


def test_a_buffer_in_a_failed_step_is_not_used_again() -> None:
    buffers = host_buffers(1)
    with pytest.raises(RuntimeError), buffers.lease() as buffer:
        failed = buffer
        raise RuntimeError("the copy failed")
    with buffers.lease() as buffer:
        assert buffer is not failed
    # What still writes to it writes to memory that nobody else has.
    assert list(buffers._aside) == [failed]
    assert buffers.release_unused(0)
    assert not buffers._aside


def test_released_when_unused() -> None:
    buffers = host_buffers(2)
    with buffers.lease():
        assert buffers.release_unused(0) is False  # one is in use
    assert buffers.release_unused(60) is False  # used just now
    assert buffers.release_unused(0) is True
    with buffers.lease() as buffer:
        assert buffer.whole(torch.uint8, 4096).numel() == 4096


def test_makes_do_with_fewer_where_memory_runs_out() -> None:
    made: list[int] = []

    def allocate(size: int) -> torch.Tensor:
        if made:
            raise RuntimeError("out of memory")
        made.append(size)
        return torch.empty(size, dtype=torch.uint8)

    buffers = Buffers(3, 4096, allocate)
    order: list[str] = []
    with buffers.lease():
        waits = threading.Thread(target=lambda: _lease(buffers, order))
        waits.start()
        time.sleep(0.05)
        order.append("first")
    waits.join()
    assert order == ["first", "second"]


def _lease(buffers: Buffers, order: list[str]) -> None:
    with buffers.lease():
        order.append("second")


def test_all_who_wait_are_told_when_the_last_buffer_is_lost() -> None:
    """The NPU is gone: its buffers are, and no new ones can be had."""
    gone = threading.Event()

    def allocate(size: int) -> torch.Tensor:
        if gone.is_set():
            raise RuntimeError("the NPU is lost")
        gone.set()
        return torch.empty(size, dtype=torch.uint8)

    buffers = Buffers(3, 4096, allocate)
    told: list[str] = []

    def work() -> None:
        try:
            with buffers.lease():
                pass
        except RuntimeError as error:
            told.append(str(error))

    threads = [threading.Thread(target=work, daemon=True) for _ in range(5)]
    with pytest.raises(RuntimeError, match="the copy failed"), buffers.lease():
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        raise RuntimeError("the copy failed")
    for thread in threads:
        thread.join(10)
    assert told == ["the NPU is lost"] * 5
    gone.clear()
    with buffers.lease():
        pass


def test_no_memory_at_all() -> None:
    def allocate(size: int) -> torch.Tensor:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"), Buffers(3, 4096, allocate).lease():
        pass


def test_cut() -> None:
    with host_buffers(1).lease() as buffer:
        first, second = buffer.cut(torch.float32, (3, 5))
        assert (first.numel(), second.numel()) == (3, 5)
        assert second.data_ptr() - first.data_ptr() == 12
        assert buffer.cut(torch.float32, (3, 5))[0] is first
        assert [view.dtype for view in buffer.cut(torch.bfloat16, (3, 5))] == [torch.bfloat16] * 2


@pytest.mark.parametrize("cap_mib", [1, 2, 7, 16, 64])
def test_bounds_hold(cap_mib: int) -> None:
    made = Staging(cap_mib * MIB, cap_mib * MIB)
    simulator.reset_counters()
    npu = torch.device("rbln", 0)
    for buffers in (made.host, made.on_device(npu, torch.bfloat16, HND_BUFFER)):
        assert buffers is not None
        assert buffers._count >= 2
        assert buffers._count * buffers.nbytes <= cap_mib * MIB
        with buffers.lease() as buffer:
            assert buffer.whole(torch.bfloat16, buffers.nbytes // 2).nbytes == buffers.nbytes


def test_host_memory_is_aligned_for_huge_pages_and_there() -> None:
    memory = staging._host_memory(4 * MIB)
    assert memory.data_ptr() % (2 * MIB) == 0
    assert memory.numel() == 4 * MIB


def test_none_on_the_device_if_so_set() -> None:
    assert Staging(MIB, 0).on_device(torch.device("rbln", 0), torch.bfloat16, HND_BUFFER) is None


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "16MB", "much", "²"])
@pytest.mark.parametrize("variable", [staging.HOST_VARIABLE, staging.DEVICE_VARIABLE])
def test_settings_that_are_no_size(
    variable: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, text)
    if variable == staging.DEVICE_VARIABLE and text == "0":
        Staging.from_environment()
        return
    with pytest.raises(ValueError, match=f"{variable}='{text}' is not a size; expected a whole"):
        Staging.from_environment()


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(staging.HOST_VARIABLE, " 4 ")
    monkeypatch.setenv(staging.DEVICE_VARIABLE, "")
    made = Staging.from_environment()
    assert 3.9 * MIB < made.host._count * made.host.nbytes <= 4 * MIB


def test_helpers_do_what_is_asked_and_end_when_idle() -> None:
    ended = threading.Event()

    def may_end() -> bool:
        ended.set()
        return True

    helpers = HelperThreads(2, 0.05, may_end)
    helpers.start()
    did: list[str] = []
    for outcome in helpers.ask(lambda: did.append(threading.current_thread().name), 5):
        outcome.result(10)
    assert did == ["lmcache-rbln"] * 2  # no more than there are
    assert ended.wait(10)
    deadline = time.monotonic() + 10
    while helpers._threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not helpers._threads
    helpers.start()  # and again
    (outcome,) = helpers.ask(lambda: did.append("again"), 1)
    outcome.result(10)
    helpers.close()
    assert not helpers._threads
    assert helpers.ask(lambda: did.append("after the end"), 1) == []


def test_an_error_of_the_work_is_its_outcome() -> None:
    helpers = HelperThreads(1, 60, lambda: True)
    helpers.start()

    def fail() -> None:
        raise RuntimeError("no")

    (outcome,) = helpers.ask(fail, 1)
    with pytest.raises(RuntimeError, match="no"):
        outcome.result(10)
    helpers.close()
