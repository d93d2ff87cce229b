# SPDX-License-Identifier: Apache-2.0
"""Device memory: out of the host's reach, finite, and accounted for."""

from __future__ import annotations

import ctypes
import signal

import pytest
import torch

from lmcache_rbln import simulator
from tests.simulator.native import FAILURE, INVALID, SUCCESS

MIB = 1 << 20


@pytest.mark.parametrize("access", ["string_at(address, 1)", "memset(address, 0, 1)"])
def test_host_access_crashes(script, access):
    script(
        f"""
        import ctypes
        from native import Runtime
        runtime = Runtime()
        assert runtime.register(0, 0) == 0
        address = runtime.malloc(4096)
        assert address
        ctypes.{access}
        """,
        code=-signal.SIGSEGV,
    )


def test_the_kernel_cannot_reach_it_either(runtime):
    address = runtime.malloc(4096)
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/dev/zero", "rb") as zeros:
        assert libc.read(zeros.fileno(), ctypes.c_void_p(address), ctypes.c_size_t(16)) == -1
    assert ctypes.get_errno() == 14  # EFAULT
    assert runtime.free(address) == SUCCESS


def test_memory_is_finite(script):
    out = script(
        """
        import torch
        from lmcache_rbln import simulator
        parts = [torch.empty(32 << 20, dtype=torch.uint8, device="rbln") for _ in range(3)]
        try:
            torch.empty(33 << 20, dtype=torch.uint8, device="rbln")
        except RuntimeError as error:
            print(error)
        assert torch.rbln.memory_stats()["num_ooms"] == 1
        assert torch.rbln.mem_get_info() == (32 << 20, 128 << 20)
        del parts[0]
        parts.append(torch.empty(33 << 20, dtype=torch.uint8, device="rbln"))
        assert torch.rbln.max_memory_allocated() == 97 << 20
        assert torch.rbln.memory_allocated() == 97 << 20
        del parts
        assert torch.rbln.memory_allocated() == 0
        torch.rbln.reset_peak_memory_stats()
        assert torch.rbln.max_memory_allocated() == 0
        """,
        memory_gb=0.125,
    )
    assert "out of memory" in out.stdout
    assert "34603008 bytes asked, 33554432 of 134217728 free" in out.stderr


def test_memory_is_not_touched_until_used(script):
    script(
        """
        import resource
        import torch
        tensors = [torch.empty(1 << 30, dtype=torch.uint8, device="rbln") for _ in range(60)]
        tensors.append(torch.zeros(1 << 30, dtype=torch.uint8, device="rbln"))
        assert torch.rbln.memory_allocated() == 61 << 30
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2 << 20  # KiB
        del tensors
        """,
        memory_gb=64,
    )


def test_each_npu_has_its_own(runtime):
    before = [torch.rbln.mem_get_info(device)[0] for device in range(2)]
    tensor = torch.empty(MIB, dtype=torch.uint8, device="rbln:1")
    after = [torch.rbln.mem_get_info(device)[0] for device in range(2)]
    assert [was - now for was, now in zip(before, after, strict=True)] == [0, MIB]
    del tensor
    assert [torch.rbln.mem_get_info(device)[0] for device in range(2)] == before


def test_freed_addresses_are_dead(runtime, capfd):
    address = runtime.malloc(100)
    host = ctypes.create_string_buffer(200)
    assert runtime.copy("v2h", address, ctypes.addressof(host), 100) == SUCCESS
    assert runtime.copy("v2h", address + 1, ctypes.addressof(host), 100) == INVALID
    assert runtime.free(address + 4) == INVALID
    assert runtime.free(address) == SUCCESS
    assert runtime.free(address) == INVALID
    assert runtime.copy("v2h", address, ctypes.addressof(host), 1) == INVALID
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 4
    assert "runs past the end of its allocation" in lines[0]
    assert "is not the start of an allocation" in lines[1]
    assert "is not allocated" in lines[3]
    # Not handed out again at once: a stale pointer does not meet somebody else's data.
    others = [runtime.malloc(100) for _ in range(50)]
    assert address not in others
    for other in others:
        assert runtime.free(other) == SUCCESS


@pytest.mark.parametrize("size", [0, 1 << 60, (1 << 64) - 1])
def test_impossible_allocations(runtime, size):
    used = simulator.counters()["live_allocations"]
    assert runtime.malloc(size) == 0
    assert simulator.counters()["live_allocations"] == used


def test_a_device_that_was_not_opened(runtime, capfd):
    assert runtime.malloc(100, device=7) == 0
    assert "rbln:7 was not opened" in capfd.readouterr().err


def test_zeros(runtime):
    tensor = torch.full((3000,), 7, dtype=torch.uint8).to("rbln")
    tensor.zero_()
    assert not tensor.cpu().any()


def test_windows_wrap_around(script):
    """Allocations go on when the addresses of an NPU are used up, past those that are alive."""
    script(
        """
        from native import Runtime
        runtime = Runtime()
        assert runtime.register(0, 0) == 0
        held = runtime.malloc(5)
        seen = {held}
        size = 3 << 40  # TiB, of the 16 that an NPU's addresses span
        for _ in range(20):
            address = runtime.malloc(size)
            assert address and not address <= held < address + size
            seen.add(address)
            assert runtime.free(address) == 0
        assert 4 < len(seen) < 12
        """,
        memory_gb=4096,
    )


class TestHostView:
    def test_aliases(self):
        tensor = torch.arange(24, dtype=torch.float32).view(2, 3, 4).to("rbln")
        view = simulator.host_view(tensor[:, 1:, ::2])
        assert view.device.type == "cpu"
        assert torch.equal(view, torch.arange(24.0).view(2, 3, 4)[:, 1:, ::2])
        view.fill_(-1)
        expected = torch.arange(24.0).view(2, 3, 4)
        expected[:, 1:, ::2] = -1
        assert torch.equal(tensor.cpu(), expected)

    @pytest.mark.parametrize(
        "dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool, torch.int64]
    )
    def test_dtypes(self, dtype):
        source = torch.ones(5, dtype=torch.float32).to(dtype)
        view = simulator.host_view(source.to("rbln"))
        assert view.dtype == dtype
        assert torch.equal(view.view(torch.uint8), source.view(torch.uint8))

    def test_is_no_borrow(self):
        tensor = torch.zeros(4, device="rbln")
        before = simulator.counters()["borrow"]
        simulator.host_view(tensor)
        assert simulator.counters()["borrow"] == before

    def test_keeps_the_tensor(self):
        view = simulator.host_view(torch.full((1000,), 3, dtype=torch.uint8).to("rbln"))
        assert (view == 3).all()

    def test_empty(self):
        assert simulator.host_view(torch.empty(0, 3, device="rbln")).shape == (0, 3)

    def test_refuses_a_cpu_tensor(self):
        with pytest.raises(simulator.SimulatorError, match=r"on cpu.*expected a simulated NPU"):
            simulator.host_view(torch.zeros(3))


def test_borrows_are_counted(runtime):
    address = runtime.malloc(64)
    host, borrow = ctypes.c_uint64(), ctypes.c_uint64()
    name = "_ZN4rbln22rbln_v_borrow_host_ptrEmmRmS0_"
    call = getattr(runtime.library, name)
    before = simulator.counters()["borrow"]["submissions"]
    arguments = (ctypes.c_uint64(address), ctypes.c_uint64(64))
    assert call(*arguments, ctypes.byref(host), ctypes.byref(borrow)) == SUCCESS
    assert ctypes.string_at(host.value, 64) == bytes(64)
    assert simulator.counters()["borrow"]["submissions"] == before + 1
    give_back = runtime.library._ZN4rbln22rbln_v_return_borrowedEmb
    assert give_back(borrow, ctypes.c_bool(True)) == SUCCESS
    assert give_back(borrow, ctypes.c_bool(True)) == INVALID
    simulator.inject("borrow@1=fail")
    assert call(*arguments, ctypes.byref(host), ctypes.byref(borrow)) == FAILURE
    assert runtime.free(address) == SUCCESS
