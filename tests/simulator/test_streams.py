# SPDX-License-Identifier: Apache-2.0
"""Asynchronous work completes later, in order, and waits mean what CUDA's mean.

Random delays make a missing wait show as wrong bytes; each test that relies on a wait also shows
that without it the bytes are wrong.
"""

from __future__ import annotations

import ctypes
import os
import threading

import pytest
import torch

from lmcache_rbln import simulator
from tests.simulator.native import FAILURE, SUCCESS

SIZE = 1 << 16
ROUNDS = 20
#: Up to this much late, so that 20 early reads in a row can't all be late enough.
DELAY_US = 20_000


@pytest.fixture(autouse=True)
def delays():
    simulator.set_delay(DELAY_US, seed=1)
    yield
    simulator.clear_faults()
    torch.rbln.synchronize()
    settings = (os.environ.get(f"RBLN_SIM_{name}") or "0" for name in ("DELAY_US", "SEED"))
    simulator.set_delay(float(next(settings)), int(next(settings)))


def device(byte: int, number: int = 0) -> torch.Tensor:
    return torch.full((SIZE,), byte, dtype=torch.uint8).to(f"rbln:{number}")


def pinned(byte: int = 0) -> torch.Tensor:
    return torch.full((SIZE,), byte, dtype=torch.uint8).pin_memory()


def has(tensor: torch.Tensor, byte: int) -> bool:
    return bool((tensor == byte).all())


def test_early_reads_see_old_bytes_and_waits_cure_it():
    source, early, waited = device(7), pinned(), pinned()
    seen = []
    for _ in range(ROUNDS):
        early.zero_()
        waited.zero_()
        early.copy_(source, non_blocking=True)
        seen.append(has(early, 7))
        waited.copy_(source, non_blocking=True)
        torch.rbln.current_stream().synchronize()
        assert has(early, 7)
        assert has(waited, 7)
    assert not all(seen), "reading too early must be found out"


def test_early_overwrites_reach_the_device():
    target, source = device(0), pinned()
    torn = 0
    for byte in range(1, ROUNDS):
        source.fill_(byte)
        target.copy_(source, non_blocking=True)
        source.fill_(99)  # too early
        torch.rbln.synchronize()
        torn += not has(target.cpu(), byte)
        source.fill_(byte)
        target.copy_(source, non_blocking=True)
        torch.rbln.synchronize()
        source.fill_(99)
        assert has(target.cpu(), byte)
    assert torn


def test_events():
    source, out, event, stream = device(5), pinned(), torch.rbln.Event(), torch.rbln.Stream()
    assert event.query(), "an event that was never recorded is complete"
    event.synchronize()
    pending = 0
    with torch.rbln.stream(stream):
        for _ in range(ROUNDS):
            out.zero_()
            out.copy_(source, non_blocking=True)
            event.record()
            pending += not event.query()
            event.synchronize()
            assert event.query()
            assert stream.query()
            assert has(out, 5)
        assert pending
        event.record()
        out.copy_(source, non_blocking=True)
        assert event.query(), "recorded before the copy"
        event.record()  # moves the event behind it
        event.synchronize()
        assert stream.query()


def test_streams_are_in_order():
    one, two, out, stream = device(1), device(2), pinned(), torch.rbln.Stream()
    with torch.rbln.stream(stream):
        for _ in range(ROUNDS):
            out.copy_(one, non_blocking=True)
            out.copy_(two, non_blocking=True)
            stream.synchronize()
            assert has(out, 2)


@pytest.mark.parametrize("ordered", [False, True])
def test_events_order_streams(ordered):
    middle, out = device(0), pinned()
    first, second = torch.rbln.Stream(), torch.rbln.Stream()
    wrong = 0
    for byte in range(1, ROUNDS):
        source = pinned(byte)
        with torch.rbln.stream(first):
            middle.copy_(source, non_blocking=True)
            event = first.record_event()
        with torch.rbln.stream(second):
            if ordered:
                second.wait_event(event)
            out.copy_(middle, non_blocking=True)
        torch.rbln.synchronize()
        wrong += not has(out, byte)
    assert bool(wrong) != ordered


def test_a_waiting_stream_does_not_block_the_host():
    middle, source = device(0), pinned(1)
    first, second = torch.rbln.Stream(), torch.rbln.Stream()
    simulator.inject("h2v@1=hang=600")
    with torch.rbln.stream(first):
        middle.copy_(source, non_blocking=True)
    second.wait_stream(first)
    event = second.record_event()
    assert not event.query()
    simulator.clear_faults()  # ends the hang
    event.synchronize()
    assert first.query()


def test_a_wait_holds_what_was_recorded_when_it_was_made():
    target, one, two = device(0), pinned(1), pinned(2)
    first, second, event = torch.rbln.Stream(), torch.rbln.Stream(), torch.rbln.Event()
    second.wait_event(event)  # never recorded: holds nothing up
    simulator.inject("h2v@2=hang=600")
    with torch.rbln.stream(first):
        target.copy_(one, non_blocking=True)
        event.record(first)
    second.wait_event(event)
    mark = second.record_event()
    with torch.rbln.stream(first):
        target.copy_(two, non_blocking=True)
        event.record(first)  # later: does not move what the second stream waits for
    mark.synchronize()
    assert not first.query()
    assert not event.query()
    simulator.clear_faults()  # ends the hang
    event.synchronize()
    assert has(target.cpu(), 2)


@pytest.mark.parametrize("default", [False, True])
def test_synchronous_copies_come_after_the_current_stream(default):
    target, source = device(0), pinned()
    with torch.rbln.stream(torch.rbln.default_stream() if default else torch.rbln.Stream()):
        for byte in range(1, ROUNDS):
            source.fill_(byte)
            target.copy_(source, non_blocking=True)
            assert has(target.cpu(), byte)  # a plain copy
            source.fill_(byte + 100)
            target.copy_(source, non_blocking=True)
            halves = [torch.empty(SIZE // 2, dtype=torch.uint8) for _ in range(2)]
            torch._foreach_copy_(halves, list(target.split(SIZE // 2)))  # a bulk copy
            assert all(has(half, byte + 100) for half in halves)


def test_synchronous_copies_do_not_wait_for_other_streams():
    target, source, stream = device(0), pinned(), torch.rbln.Stream()
    missed = 0
    for byte in range(1, ROUNDS):
        source.fill_(byte)
        with torch.rbln.stream(stream):
            target.copy_(source, non_blocking=True)
        missed += not has(target.cpu(), byte)
        stream.synchronize()
    assert missed


@pytest.mark.parametrize("number", [0, 1])
def test_device_synchronize_waits_for_all_streams_of_the_device(number):
    source, outs = device(3, number), [pinned() for _ in range(4)]
    streams = [torch.rbln.Stream(number) for _ in outs]
    for out, stream in zip(outs, streams, strict=True):
        with torch.rbln.stream(stream):
            out.copy_(source, non_blocking=True)
    torch.rbln.synchronize(number)
    assert all(stream.query() for stream in streams)
    assert all(has(out, 3) for out in outs)


def test_freed_tensors_live_until_the_copy_is_done():
    out, live = pinned(), simulator.counters()["live_allocations"]
    for byte in range(ROUNDS):
        source = device(byte)
        out.copy_(source, non_blocking=True)
        del source
        torch.rbln.synchronize()
        assert has(out, byte)
    assert simulator.counters()["live_allocations"] == live


def test_pageable_memory_is_copied_synchronously():
    source, out = device(9), torch.zeros(SIZE, dtype=torch.uint8)
    for _ in range(ROUNDS):
        out.zero_()
        out.copy_(source, non_blocking=True)
        assert has(out, 9)


def test_threads_have_their_own_current_stream():
    stream, seen = torch.rbln.Stream(), []
    with torch.rbln.stream(stream):
        thread = threading.Thread(target=lambda: seen.append(torch.rbln.current_stream().stream_id))
        thread.start()
        thread.join()
        assert seen == [0]
        assert torch.rbln.current_stream().stream_id == stream.stream_id != 0


def test_seeds_replay(script):
    """The same seed gives the same delays, another gives others."""
    text = """
    import ctypes, time
    from native import Runtime
    runtime = Runtime()
    runtime.register(0, 0)
    device, host = runtime.malloc(64), ctypes.create_string_buffer(64)
    for _ in range(5):
        started = time.monotonic()
        runtime.copy_async("v2h", device, ctypes.addressof(host), 64)
        runtime.synchronize()
        print(time.monotonic() - started)
    """

    def delays(seed: int) -> list[float]:
        # A sleep only ever lasts too long, so the shortest of some runs is what was drawn.
        runs = [script(text, delay_us=100_000, seed=seed).stdout.splitlines() for _ in range(3)]
        return [min(map(float, times)) for times in zip(*runs, strict=True)]

    first, again, other = delays(3), delays(3), delays(4)
    assert all(abs(a - b) < 0.03 for a, b in zip(first, again, strict=True)), (first, again)
    assert any(abs(a - b) > 0.03 for a, b in zip(first, other, strict=True)), (first, other)


@pytest.mark.parametrize("ending", ["", "import os; os._exit(0)"])
def test_exit_with_work_in_flight(script, ending):
    result = script(
        f"""
    import torch
    size = 64 << 20
    source = torch.ones(size, dtype=torch.uint8).to("rbln")
    outs = [torch.zeros(size, dtype=torch.uint8).pin_memory() for _ in range(2)]
    for _ in range(10):
        for out in outs:
            out.copy_(source, non_blocking=True)
    del source
    {ending}
    """,
        delay_us=5_000,
    )
    assert result.stderr == ""


def test_host_memory_that_is_freed_too_early_is_told(runtime, capfd):
    address = runtime.malloc(SIZE)
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    for direction in ("h2v", "v2h"):
        host = libc.mmap(None, ctypes.c_size_t(SIZE), 3, 0x22, -1, 0)  # private, anonymous
        simulator.inject(f"{direction}@1=hang=0.3")
        ends = (host, address) if direction == "h2v" else (address, host)
        assert runtime.copy_async(direction, *ends, SIZE) == SUCCESS
        assert libc.munmap(ctypes.c_void_p(host), ctypes.c_size_t(SIZE)) == 0
        assert runtime.synchronize() == FAILURE
        assert "its host memory was freed before it was done" in capfd.readouterr().err
    assert runtime.free(address) == SUCCESS
