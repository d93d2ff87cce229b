# SPDX-License-Identifier: Apache-2.0
"""The cost model, measured: fastest of several runs, since other work on the machine only slows.

Calls the library directly, without the time that torch takes for each copy.
"""

from __future__ import annotations

import json

import pytest

MEASURE = """
    import ctypes, json, threading, time
    from native import Runtime
    runtime = Runtime()
    runtime.register(0, 0)
    SIZE = 64 << 20
    first, second = runtime.malloc(SIZE), runtime.malloc(SIZE)
    memory = ctypes.create_string_buffer(1)  # no bytes are moved: its size does not matter
    host = ctypes.addressof(memory)
    ends = {"h2v": (host, first), "v2h": (first, host), "v2v": (first, second)}

    def fastest(work, runs=7):
        times = []
        for _ in range(runs):
            started = time.perf_counter()
            work()
            times.append(time.perf_counter() - started)
        return min(times)

    def large(direction, times=1):
        for _ in range(times):
            assert runtime.copy(direction, *ends[direction], SIZE) == 0
"""


@pytest.fixture
def measure(script):
    """Run a script after the prelude; returns what it printed, read as JSON."""

    def run(text: str, **settings: object):
        return json.loads(script(MEASURE + text, copy=False, **settings).stdout)

    return run


@pytest.mark.parametrize("gbps", [8, 14])
def test_bandwidth_of_large_copies(measure, gbps):
    """Within 3 % of the setting, both directions."""
    found = measure(
        """
    print(json.dumps({d: SIZE / (fastest(lambda: large(d, 5)) / 5) / 1e9 for d in ("h2v", "v2h")}))
    """,
        link_gbps=gbps,
    )
    assert all(gbps * 0.97 < each < gbps * 1.03 for each in found.values()), found


def test_bandwidth_within_the_device(measure):
    found = measure(
        "\n    print(SIZE / (fastest(lambda: large('v2v', 10)) / 10) / 1e9)",
        link_gbps=8,
        d2d_gbps=200,
    )
    assert 200 * 0.97 < found <= 200 * 1.02, found


def test_small_submissions(measure):
    """n submissions cost n times the fixed cost, within 10 %."""
    found = measure(
        """
    def small():
        for _ in range(200):
            runtime.copy("h2v", host, first, 8)
    print(fastest(small, 15) / 200 * 1e6)
    """,
        submit_us=100,
        link_gbps=8,
    )
    assert 100 * 0.98 < found < 100 * 1.1, found


def test_entries_of_a_bulk_call(measure):
    found = measure(
        """
    ops = [(host + i, first + i, 1) for i in range(16)]
    def bulk():
        for _ in range(50):
            assert runtime.bulk("h2v", ops) == 0
    print(fastest(bulk, 15) / 50 * 1e6)
    """,
        submit_us=100,
        entry_us=20,
    )
    assert 420 * 0.98 < found < 420 * 1.1, found


def test_directions_run_side_by_side_and_one_direction_in_turn(measure):
    found = measure(
        """
    def together(*directions):
        threads = [threading.Thread(target=large, args=(d,)) for d in directions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    print(json.dumps([fastest(lambda: together(*pair)) * 1e3
                      for pair in (("h2v", "v2h"), ("h2v", "h2v"))]))
    """,
        link_gbps=2,
    )
    one = 64 * 2**20 / 2e9 * 1e3  # ms
    assert one <= found[0] < one * 1.3, found
    assert 2 * one <= found[1] < 2 * one * 1.15, found


def test_copies_leave_the_cpu_to_others(measure):
    found = measure(
        """
    started = time.process_time()
    large("h2v", 3)
    print(time.process_time() - started)
    """,
        link_gbps=1,
    )
    assert found < 0.02, f"{found} s of CPU for 0.2 s of copies"


def test_queued_copies_start_at_the_modelled_end_of_the_one_before(measure):
    """Late wake-ups of the worker are not charged: 200 queued copies take 200 times one."""
    found = measure(
        """
    def queued():
        for _ in range(200):
            assert runtime.copy_async("v2h", first, host, 8) == 0
        assert runtime.synchronize() == 0
    print(fastest(queued, 15) / 200 * 1e6)
    """,
        submit_us=100,
    )
    assert 100 * 0.98 < found < 100 * 1.05, found


def test_nothing_is_modelled_unless_asked_for(measure):
    assert measure("\n    print(fastest(lambda: large('h2v')))") < 0.005


def test_bytes_are_still_right(script):
    script(
        """
        import torch
        host = torch.randint(0, 255, (1 << 20,), dtype=torch.uint8)
        device = host.to("rbln")
        assert torch.equal(device.clone().cpu(), host)
        del device
        """,
        link_gbps=8,
        d2d_gbps=200,
        submit_us=30,
        entry_us=2,
    )
