# SPDX-License-Identifier: Apache-2.0
"""What torch-rbln can ask about the device is answered, truthfully, and opens nothing."""

from __future__ import annotations

import pytest

PRELUDE = """
    import torch
    from lmcache_rbln import simulator
    rbln = torch.rbln
    GIB = 1 << 30
"""


def test_properties_and_memory(script):
    script(
        PRELUDE
        + """
    properties = rbln.get_device_properties(0)
    assert (properties.name, properties.total_memory) == ("RBLN-SIMULATED", 3 * GIB)
    assert (properties.npu_count, properties.num_chiplet) == (1, 4)
    assert properties.memory_per_chiplet == 3 * GIB // 4
    assert rbln.get_device_name("rbln:1") == "RBLN-SIMULATED"
    assert (rbln.device_count(), rbln.physical_device_count()) == (2, 2)
    assert not rbln.is_dummy_device()
    assert simulator.counters()["open"] == 0, "asking opens nothing"

    tensor = torch.empty(GIB, dtype=torch.uint8, device="rbln:1")
    assert rbln.mem_get_info(0) == (3 * GIB, 3 * GIB)
    assert rbln.mem_get_info(1) == (2 * GIB, 3 * GIB)
    chiplets = rbln.mem_get_info_per_chiplet(1)
    for scope, share in {"npu.0": 1, **{f"npu.0.chiplet.{n}": 4 for n in range(4)}}.items():
        figures = [chiplets[f"{scope}.{name}"] for name in ("total", "used", "free")]
        assert figures == [3 * GIB // share, GIB // share, 2 * GIB // share]
    assert chiplets["npu.0.chiplet.3.largest_free"] == 2 * GIB // 4
    assert chiplets["npu.0.granularity"] == 4096
    stats = rbln.memory_stats(1)
    assert stats["allocated.current"] == stats["reserved.current"] == GIB
    assert stats["num_device_alloc"] == 1 and stats["num_ooms"] == 0
    assert rbln.memory_stats_per_chiplet(1)["npu.0.chiplet.3.allocated.current"] == GIB // 4
    assert rbln.memory_allocated(1) == rbln.max_memory_reserved(1) == GIB
    assert rbln.memory_allocated(0) == 0
    assert "1024.0" in rbln.memory_summary(1)
    rbln.empty_cache(1)
    del tensor
    assert rbln.memory_allocated(1) == 0 and rbln.max_memory_allocated(1) == GIB
    assert rbln.memory_stats(1)["allocated.total_freed"] == GIB
    rbln.reset_peak_memory_stats(1)
    rbln.reset_accumulated_memory_stats(1)
    assert rbln.max_memory_allocated(1) == rbln.memory_stats(1)["num_device_alloc"] == 0
    """,
        npus=2,
        memory_gb=3,
    )


@pytest.mark.parametrize(
    ("variables", "groups"),
    [
        ({"RBLN_NPUS_PER_DEVICE": "2"}, [[0, 1], [2, 3]]),
        ({"RBLN_DEVICE_MAP": "[0,3],[1,2]"}, [[0, 3], [1, 2]]),
        ({"RBLN_DEVICES": "3,1", "RBLN_NPUS_PER_DEVICE": "2"}, [[0, 1]]),
    ],
)
def test_logical_devices(script, variables, groups):
    script(
        PRELUDE
        + f"""
    from torch_rbln._internal.rsd_utils import get_physical_device_ids
    groups = {groups!r}
    assert rbln.device_count() == len(groups)
    for device, group in enumerate(groups):
        assert get_physical_device_ids(device) == group
        assert rbln.get_device_properties(device).npu_count == len(group)
        assert rbln.get_device_properties(device).total_memory == len(group) * GIB
        # A tensor lives on one NPU; those of a device are filled one after the other.
        tensors = [torch.full((3 << 28,), device, dtype=torch.uint8, device=f"rbln:{{device}}")
                   for _ in group]
        assert rbln.mem_get_info(device) == (len(group) << 28, len(group) * GIB)
        assert len([key for key in rbln.memory_stats_per_chiplet(device)
                    if key.endswith(".allocated.current")]) == len(group) * 4
        assert all(int(tensor[-1].item()) == device for tensor in tensors)
        del tensors
    """,
        variables=variables,
        npus=4,
        memory_gb=1,
    )


def test_diagnose(script):
    result = script(
        "import sys; sys.argv = ['diagnose']; import runpy; "
        "runpy.run_module('torch_rbln.diagnose', run_name='__main__')",
        variables={"TORCH_RBLN_DIAGNOSE": "1"},
    )
    assert "verdict: OK" in result.stderr
    assert "simulated (lmcache-rbln)" in result.stderr


def test_nothing_is_said_at_exit(script):
    result = script(
        PRELUDE
        + """
    def work():
        host = torch.ones(1000).pin_memory()
        device = host.to("rbln", non_blocking=True)
        with rbln.stream(rbln.Stream()):
            device.copy_(host, non_blocking=True)
            rbln.Event().record()
        return device.cpu()
    work()
    """
    )
    assert (result.stdout, result.stderr) == ("", "")


def test_no_npu(script):
    script(
        "import torch; assert not torch.rbln.is_available() and torch.rbln.device_count() == 0",
        npus=0,
    )
