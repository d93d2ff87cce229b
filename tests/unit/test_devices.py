# SPDX-License-Identifier: Apache-2.0
"""What the commands' workers run on, and which NPU each of two gets."""

from __future__ import annotations

import os
import sys

import pytest

from lmcache_rbln import simulator
from lmcache_rbln.cli import _devices


@pytest.mark.parametrize(
    "selection, first, second",
    [
        ({}, {"RBLN_DEVICES": "0"}, {"RBLN_DEVICES": "1"}),
        ({"RBLN_DEVICES": "4, 6,7"}, {"RBLN_DEVICES": "4"}, {"RBLN_DEVICES": "6"}),
        (
            {"RBLN_VISIBLE_DEVICES": "2,3"},
            {"RBLN_VISIBLE_DEVICES": "2"},
            {"RBLN_VISIBLE_DEVICES": "3"},
        ),
        # The narrower of the two.
        (
            {"RBLN_VISIBLE_DEVICES": "0,1,2,3", "RBLN_DEVICES": "2,3"},
            {"RBLN_VISIBLE_DEVICES": "0,1,2,3", "RBLN_DEVICES": "2"},
            {"RBLN_VISIBLE_DEVICES": "0,1,2,3", "RBLN_DEVICES": "3"},
        ),
        # Chips that are joined to one device stay so.
        ({"RBLN_NPUS_PER_DEVICE": "2"},) + ({"RBLN_NPUS_PER_DEVICE": "2"},) * 2,
        ({"RBLN_DEVICE_MAP": "0,1"},) + ({"RBLN_DEVICE_MAP": "0,1"},) * 2,
        ({"RBLN_DEVICES": "5"},) + ({"RBLN_DEVICES": "5"},) * 2,
    ],
)
def test_an_npu_for_each_of_two_workers(
    selection: dict[str, str], first: dict[str, str], second: dict[str, str]
) -> None:
    assert _devices.worker_environments(selection, 2) == (first, second)


def test_one_npu_for_both() -> None:
    assert _devices.worker_environments({"A": "b"}, 1) == ({"A": "b"}, {"A": "b"})


def seen(monkeypatch: pytest.MonkeyPatch, **status: object) -> None:
    monkeypatch.setattr(_devices, "_ask_for_npu", lambda _: status)


def test_a_host_with_npus(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("RBLN_"):
            monkeypatch.delenv(name)
    seen(monkeypatch, available=True, simulated=False, count=4, reason="")
    found = _devices.find_devices()
    assert (found.name, found.why, found.shared) == ("NPU", "", False)
    assert [env["RBLN_DEVICES"] for env in found.environments] == ["0", "1"]
    assert "RBLN_DEVICES" not in found.server_environment


def test_a_simulated_npu_that_is_there_already(monkeypatch: pytest.MonkeyPatch) -> None:
    seen(monkeypatch, available=True, simulated=True, count=1, reason="")
    found = _devices.find_devices()
    assert found.name == "simulated NPU"
    assert found.why == "the one that this command was started with"
    assert found.shared


def test_a_host_without_npus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        simulator, "environment", lambda base, npus, host: {**base, "NPUS": str(npus), "HOST": host}
    )
    monkeypatch.setenv("RBLN_DEVICES", "6")
    seen(monkeypatch, available=False, simulated=False, count=0, reason="no driver")
    found = _devices.find_devices()
    assert (found.name, found.why, found.shared) == ("simulated NPU", "no driver", False)
    # A selection among NPUs that are not there is of no meaning for the simulated ones.
    assert [env["RBLN_DEVICES"] for env in found.environments] == ["0", "1"]
    assert found.server_environment["NPUS"] == "2"


def test_a_runtime_that_ends_the_process_that_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    found = _devices._ask_for_npu(dict(os.environ))
    assert not found["available"]
    assert found["reason"] == "asking for an NPU ended with exit code 1"
