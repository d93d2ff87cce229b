# SPDX-License-Identifier: Apache-2.0
"""The insides of LMCache that ``lmcache_compat.connector`` relies on are still there.

Read from LMCache 0.5.4, 0.5.5 and 0.5.6. A test that fails names what has moved, or what has
become unnecessary here.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from lmcache.integration.vllm import lmcache_mp_connector, lmcache_mp_metadata
from lmcache.integration.vllm.vllm_multi_process_adapter import LMCacheMPWorkerAdapter

from lmcache_rbln.lmcache_compat import connector as compat


def source(thing: Any) -> str:
    return inspect.getsource(thing)


def test_stores_by_request() -> None:
    """One future a request; a drain takes the keys, then clears. ``UnsettledStores``."""
    adapter = source(LMCacheMPWorkerAdapter)
    assert "self.store_futures[request_id] = future" in adapter
    drain = source(LMCacheMPWorkerAdapter.get_finished)
    assert "finished_stores = set(self.store_futures.keys())" in drain
    assert "self.store_futures.clear()" in drain
    assert "in self.store_futures.items():" in drain


def test_the_flush_is_skipped_while_the_server_is_silent() -> None:
    """``flush_while_unreachable``."""
    assert "if not self.is_healthy" in source(LMCacheMPWorkerAdapter.handle_preemptions)


def test_progress_is_a_sum() -> None:
    """``set_progress``."""
    store = source(lmcache_mp_metadata.LMCacheMPRequestMetadata.GetStoreMetadata)
    assert "computed_tokens = tracker.num_scheduled_tokens + max(" in store
    assert "tracker.num_vllm_hit_tokens, tracker.num_lmcache_hit_tokens" in store


@pytest.mark.parametrize(
    "name", ["_ensure_heartbeat_started", "is_healthy", "_reregister_kv_caches_callback"]
)
def test_adapter_has(name: str) -> None:
    assert hasattr(LMCacheMPWorkerAdapter, name)


@pytest.mark.parametrize("name", ["transfer_ctx", "_mq_timeout", "instance_id", "kv_caches"])
def test_adapter_sets(name: str) -> None:
    assert f"self.{name}" in source(LMCacheMPWorkerAdapter.__init__)


@pytest.mark.parametrize(
    "name", ["worker_adapter", "scheduler_adapter", "request_trackers", "lmcache.mp.server_urls"]
)
def test_connector_has(name: str) -> None:
    assert name in source(lmcache_mp_connector.LMCacheMPConnector.__init__)


def test_the_heartbeat_waits_for_the_first_transfer() -> None:
    """``start_heartbeat`` is unnecessary once registration starts it."""
    assert "_ensure_heartbeat_started" not in source(LMCacheMPWorkerAdapter.register_kv_caches)


class Future:
    def __init__(self, result: bool | None = None) -> None:
        self.outcome = result

    def query(self) -> bool:
        return self.outcome is not None

    def result(self, timeout: float | None = None) -> bool:
        assert self.outcome is not None
        return self.outcome


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("second", [True, False])
def test_two_stores_are_one(first: bool, second: bool) -> None:
    stores = compat.UnsettledStores()
    one, two = Future(), Future()
    stores["r"] = one
    stores["r"] = two
    two.outcome = second
    assert not stores["r"].query()
    assert list(stores.keys()) == []
    stores.clear()
    assert "r" in stores
    one.outcome = first
    assert stores["r"].query()
    assert stores["r"].result(timeout=1) is (first and second)
    assert list(stores.keys()) == ["r"]
    stores.clear()
    assert not stores


def test_a_changed_adapter_is_refused() -> None:
    with pytest.raises(RuntimeError, match="changed: object has no store_futures, transfer_ctx"):
        compat.require_adapter(object())
