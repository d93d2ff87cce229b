# SPDX-License-Identifier: Apache-2.0
"""Faults fire where they are told to, once, and the NPU goes on afterwards."""

from __future__ import annotations

import ctypes
import time

import pytest
import torch

from lmcache_rbln import simulator
from tests.simulator.native import FAILURE, SUCCESS

CALLS = {
    "h2v": lambda t: t.device.copy_(t.host),
    "v2h": lambda t: t.host.copy_(t.device),
    "v2v": lambda t: t.other.copy_(t.device),
    "malloc": lambda t: torch.empty(10, device="rbln"),
    "sync": lambda t: torch.rbln.synchronize(),
    "borrow": lambda t: t.device + t.other,
}


class Tensors:
    def __init__(self) -> None:
        self.host = torch.arange(1000, dtype=torch.int32)
        self.device = self.host.to("rbln")
        self.other = torch.zeros_like(self.device)


@pytest.fixture
def tensors(runtime):
    made = Tensors()
    simulator.reset_counters()
    return made


@pytest.mark.parametrize("kind", ["h2v", "v2h", "v2v", "malloc", "sync"])
@pytest.mark.parametrize("count", [1, 3])
def test_the_nth_call_fails(tensors, kind, count):
    simulator.inject(f"{kind}@{count}=fail")
    for number in range(1, 6):
        if number == count:
            with pytest.raises(RuntimeError, match="rbln"):
                CALLS[kind](tensors)
        else:
            CALLS[kind](tensors)
    counters = simulator.counters()
    assert (counters["faults_fired"], counters["faults_armed"]) == (1, 0)
    assert counters["calls"][kind] == 5
    if kind in counters and kind != "malloc":
        assert counters[kind]["submissions"] == 4


def test_a_refused_borrow(tensors):
    """torch-rbln has another way then: it copies."""
    simulator.inject("borrow@1=fail")
    assert torch.equal((tensors.device + tensors.device).cpu(), tensors.host * 2)
    counters = simulator.counters()
    assert counters["faults_fired"] == 1
    assert counters["borrow"]["submissions"] == counters["calls"]["borrow"] - 1


def test_any_counts_all_kinds(tensors):
    simulator.inject("any@4=fail")
    tensors.device.copy_(tensors.host)
    tensors.host.copy_(tensors.device)
    torch.rbln.synchronize()
    with pytest.raises(RuntimeError):
        torch.empty(10, device="rbln")


def test_faults_are_counted_from_when_they_are_injected(tensors):
    tensors.device.copy_(tensors.host)
    simulator.inject("h2v@2=fail")
    simulator.inject("h2v@1=fail")
    for fails in (True, True, False):
        if fails:
            with pytest.raises(RuntimeError):
                tensors.device.copy_(tensors.host)
        else:
            tensors.device.copy_(tensors.host)


def test_a_list_and_its_removal(tensors):
    simulator.inject("h2v@1=fail;v2h@1=fail;sync@9=lost")
    assert simulator.counters()["faults_armed"] == 3
    simulator.clear_faults()
    tensors.device.copy_(tensors.host)
    tensors.host.copy_(tensors.device)
    assert simulator.counters()["faults_fired"] == 0


def test_a_bulk_call_is_one_call(tensors):
    """torch-rbln 0.12.0 meets a failing bulk call by copying entry by entry."""
    simulator.inject("h2v@2=fail")
    new = tensors.host + 1
    pairs = (list(tensors.device.split(100)), list(new.split(100)))
    torch._foreach_copy_(*pairs)
    assert simulator.counters()["h2v"]["submissions"] == 1
    torch._foreach_copy_(*pairs)
    assert simulator.counters()["h2v"]["submissions"] == 11
    assert simulator.counters()["h2v"]["entries"] == 20
    simulator.inject("h2v@1=fail;h2v@4=fail")
    with pytest.raises(RuntimeError):
        torch._foreach_copy_(*pairs)


def test_nothing_is_copied_by_a_failing_call(tensors):
    simulator.inject("h2v@1=fail")
    with pytest.raises(RuntimeError):
        tensors.device.copy_(tensors.host + 1)
    assert torch.equal(tensors.device.cpu(), tensors.host)


def test_short_copies_half_and_fails(tensors):
    new = tensors.host + 5000
    simulator.inject("h2v@1=short")
    with pytest.raises(RuntimeError):
        tensors.device.copy_(new)
    seen = tensors.device.cpu()
    assert torch.equal(seen[:500], new[:500])
    assert torch.equal(seen[500:], tensors.host[500:])


def test_short_bulk_copies_the_first_half(runtime):
    host, address = ctypes.create_string_buffer(b"x" * 64, 64), runtime.malloc(64)
    ops = [(ctypes.addressof(host) + i * 8, address + i * 8, 8) for i in range(8)]
    simulator.inject("h2v@1=short")
    assert runtime.bulk("h2v", ops) == FAILURE
    assert runtime.copy("v2h", address, ctypes.addressof(host), 64) == SUCCESS
    assert host.raw == b"x" * 32 + bytes(32)
    assert runtime.free(address) == SUCCESS


def test_hang(tensors):
    simulator.inject("v2h@1=hang=0.3")
    started = time.monotonic()
    tensors.host.copy_(tensors.device)
    assert time.monotonic() - started >= 0.3


def test_asynchronous_hang_holds_the_stream_not_the_caller(tensors):
    pinned, event = torch.zeros(1000, dtype=torch.int32).pin_memory(), torch.rbln.Event()
    simulator.inject("v2h@1=hang=0.5")
    pinned.copy_(tensors.device, non_blocking=True)
    event.record()
    assert not event.query()
    event.synchronize()
    assert torch.equal(pinned, tensors.host)


@pytest.mark.parametrize("kind", ["h2v", "v2h", "v2v", "malloc", "sync"])
def test_a_lost_device_stays_lost_until_cleared(tensors, kind):
    simulator.inject(f"{kind}@1=lost")
    event = torch.rbln.Event()
    event.record()
    for action in CALLS.values():
        if action is CALLS[kind]:
            with pytest.raises(RuntimeError):
                action(tensors)
    for action in (*CALLS.values(), lambda t: event.query(), lambda t: event.synchronize()):
        with pytest.raises(RuntimeError):
            action(tensors)
    assert torch.rbln.is_available(), "asking whether there is an NPU opens none"
    # The other NPU is still there.
    assert torch.ones(3, device="rbln:1").cpu().tolist() == [1, 1, 1]
    simulator.clear_faults()
    for name, action in CALLS.items():
        if name != "borrow":
            action(tensors)
    assert torch.equal(tensors.device.cpu(), tensors.host)


def test_memory_of_a_lost_device_can_be_freed(tensors, capfd):
    live = simulator.counters()["live_allocations"]
    extra = torch.zeros(10, device="rbln")
    simulator.inject("sync@1=lost")
    with pytest.raises(RuntimeError):
        torch.rbln.synchronize()
    capfd.readouterr()
    del extra
    assert simulator.counters()["live_allocations"] == live
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("wait", ["device", "stream", "event", "copy"])
@pytest.mark.parametrize("action", ["short", "lost"])
def test_asynchronous_failures_are_told_to_who_waits(tensors, wait, action):
    pinned, stream, event = (
        torch.zeros(1000, dtype=torch.int32).pin_memory(),
        torch.rbln.Stream(),
        torch.rbln.Event(),
    )
    waits = {
        "device": torch.rbln.synchronize,
        "stream": stream.synchronize,
        "event": event.synchronize,
        "copy": tensors.device.cpu,
    }
    simulator.set_delay(20_000)
    with torch.rbln.stream(stream):
        if action == "short":
            simulator.inject("v2h@1=short")
        pinned.copy_(tensors.device, non_blocking=True)
        event.record()
        if action == "lost":
            simulator.inject("malloc@1=lost")
            with pytest.raises(RuntimeError):
                torch.empty(1, device="rbln")
        with pytest.raises(RuntimeError):
            waits[wait]()
    simulator.clear_faults()
    simulator.set_delay(0)
    if action == "short":
        torch.rbln.synchronize()  # told once
        assert torch.equal(pinned[:500], tensors.host[:500])
        assert not pinned[500:].any()


def test_work_queued_before_a_loss_is_not_done(runtime):
    """It ends at once, without a byte being moved, also when the device is brought back first."""
    host = ctypes.create_string_buffer(b"x" * 64, 64)
    address = runtime.malloc(64)
    assert runtime.copy("h2v", ctypes.addressof(host), address, 64) == SUCCESS
    out = ctypes.create_string_buffer(64)
    simulator.inject("v2h@1=hang=60;v2h@2=lost")
    assert runtime.copy_async("v2h", address, ctypes.addressof(out), 64) == SUCCESS
    assert runtime.copy_async("v2h", address, ctypes.addressof(out), 64) == FAILURE
    assert runtime.synchronize() == FAILURE
    simulator.clear_faults()
    assert runtime.synchronize() == SUCCESS, "what was lost is forgotten, and the hang is over"
    assert out.raw == bytes(64)
    assert runtime.free(address) == SUCCESS


def test_a_failing_open(script):
    out = script(
        """
        import torch
        assert torch.rbln.is_available() and torch.rbln.device_count() == 1
        try:
            torch.empty(1, device="rbln")
        except RuntimeError as error:
            print(error)
        """,
        faults="open@1=fail",
    )
    assert "rbln_register_device_id failed for rbln:0" in out.stdout
    assert "failing as injected" in out.stderr


def test_faults_of_the_environment(script):
    script(
        """
        import torch
        device = torch.zeros(4, dtype=torch.int32, device="rbln")
        device.copy_(torch.ones(4, dtype=torch.int32))
        try:
            device.copy_(torch.ones(4, dtype=torch.int32))
        except RuntimeError:
            del device
        else:
            raise SystemExit("the second copy should have failed")
        """,
        faults="h2v@2=fail",
    )


def test_thousands_in_one_process(runtime):
    host, address = ctypes.create_string_buffer(64), runtime.malloc(64)
    for number in range(2000):
        simulator.inject(f"h2v@1={'lost' if number % 2 else 'fail'}")
        assert runtime.copy("h2v", ctypes.addressof(host), address, 64) == FAILURE
        simulator.clear_faults()
        assert runtime.copy("h2v", ctypes.addressof(host), address, 64) == SUCCESS
    assert runtime.free(address) == SUCCESS


@pytest.mark.parametrize(
    "faults",
    [
        "h2v",
        "h2v@1",
        "h2v@0=fail",
        "h2v@-1=fail",
        "h2v@x=fail",
        "warp@1=fail",
        "h2v@1=explode",
        "h2v@1=hang",
        "h2v@1=hang=",
        "h2v@1=hang=-1",
        "h2v@1=hang=nan",
        "h2v@1=hang=1e9",
        "malloc@1=short",
        "h2v@1=fail,v2h@1=fail",
        "h2v@1=fail; v2h@1=fail",
    ],
)
def test_what_is_no_fault_is_refused(faults):
    armed = simulator.counters()["faults_armed"]
    with pytest.raises(ValueError, match=r"is not a list of faults: expected"):
        simulator.inject(faults)
    assert simulator.counters()["faults_armed"] == armed
