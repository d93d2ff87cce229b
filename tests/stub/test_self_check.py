# SPDX-License-Identifier: Apache-2.0
"""The self-check passes on a right runtime, once, and refuses a wrong one."""

from __future__ import annotations

import threading

import pytest
import torch

from lmcache_rbln import kv_layout, self_check, simulator
from tests import reference
from tests.reference import Geometry


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(self_check, "_verdicts", {})
    monkeypatch.setattr(self_check, "_unchecked", set())
    yield
    simulator.clear_faults()


def paged(layout="kv_first", *, heads=3, block=16, size=8, dtype=torch.bfloat16, device="rbln:0"):
    geometry = Geometry(layout, 4, 5, 1 if layout == "mla" else heads, block, size, 2, dtype)
    layers = [torch.zeros(geometry.layer_shape, dtype=dtype, device=device) for _ in range(4)]
    return kv_layout.resolve(layers)


def calls() -> dict[str, int]:
    return simulator.counters()["calls"]


@pytest.mark.parametrize("dtype", reference.DTYPES, ids=str)
@pytest.mark.parametrize("layout", reference.LAYOUTS)
def test_a_right_runtime_passes_and_is_not_asked_again(layout, dtype):
    cache = paged(layout, dtype=dtype)
    before = calls()
    self_check.ensure(cache)
    checked = calls()
    assert checked != before
    self_check.ensure(cache)
    assert calls() == checked


@pytest.mark.parametrize(
    ("heads", "block", "size"), [(1, 1, 1), (2, 1024, 128), (8, 256, 128), (5, 3, 7)]
)
@pytest.mark.parametrize("layout", reference.LAYOUTS)
def test_other_sizes(layout, heads, block, size):
    self_check.ensure(paged(layout, heads=heads, block=block, size=size))


def test_each_device_is_checked_for_itself():
    self_check.ensure(paged(device="rbln:0"))
    before = calls()
    self_check.ensure(paged(device="rbln:1"))
    assert calls() != before


@pytest.mark.parametrize("kind", ["v2h", "h2v"])
@pytest.mark.parametrize("layout", reference.LAYOUTS)
def test_a_wrong_copy_refuses_the_backend(layout, kind):
    cache = paged(layout, heads=2)
    simulator.inject(";".join(f"{kind}@{n}=wrong" for n in range(1, 40)))
    with pytest.raises(RuntimeError, match="does not move KV blocks right"):
        self_check.ensure(cache)
    simulator.clear_faults()
    with pytest.raises(RuntimeError, match="does not move KV blocks right"):
        self_check.ensure(cache)


def test_a_wrong_copy_refuses_a_transfer(transfer):
    cache = paged("kv_first")
    chunk = torch.zeros(cache.chunk_shape(32), dtype=cache.dtype)
    simulator.inject("v2h@1=wrong")
    with pytest.raises(RuntimeError, match="LMCACHE_RBLN_SELF_CHECK=0"):
        transfer("gather", list(cache.layers), [chunk], [3, 1], block_size=16, chunk_tokens=32)
    assert not chunk.view(torch.uint8).any()


def test_it_can_be_turned_off(monkeypatch):
    monkeypatch.setenv("LMCACHE_RBLN_SELF_CHECK", "0")
    cache = paged()
    before = calls()
    self_check.ensure(cache)
    assert calls() == before


def test_a_failed_copy_is_no_verdict():
    cache = paged()
    simulator.inject("h2v@1=lost")
    with pytest.raises(RuntimeError, match="rbln"):
        self_check.ensure(cache)
    simulator.clear_faults()
    self_check.ensure(cache)


def test_no_room_is_no_verdict(caplog):

    logger = self_check._logger()
    logger.addHandler(caplog.handler)
    try:
        cache = paged(block=1024, size=128)
        # Device memory comes in whole segments; the first call to the runtime is refused.
        torch.rbln.empty_cache()
        simulator.inject("malloc@1=fail;malloc@2=fail;malloc@3=fail;malloc@4=fail")
        self_check.ensure(cache)
        assert "no room" in caplog.text
        assert not self_check._verdicts
    finally:
        logger.removeHandler(caplog.handler)
    simulator.clear_faults()
    self_check.ensure(cache)
    assert list(self_check._verdicts.values()) == [""]


def test_threads_check_once():
    cache = paged()
    self_check.ensure(cache)  # Staging is made at the first transfer of a process.
    self_check._verdicts.clear()
    before = calls()
    self_check.ensure(cache)
    once = sum(calls().values()) - sum(before.values())
    self_check._verdicts.clear()
    before = calls()
    threads = [threading.Thread(target=self_check.ensure, args=(cache,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(calls().values()) - sum(before.values()) == once
