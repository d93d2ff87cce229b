# SPDX-License-Identifier: Apache-2.0
"""What the vLLM connector does to the insides of LMCache's own connector.

``LMCacheMPConnector`` does the work; ``integration.vllm.connector`` derives from it and calls in
here where it must look behind the public hooks. ``tests/vllm/test_upstream.py`` fails when one of
the names used here moves.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from lmcache.logging import init_logger

from lmcache_rbln.lmcache_compat import requests, versions

logger = init_logger("lmcache_rbln.connector")

#: Seconds of silence that every server allows (its --worker-reap-timeout-seconds is not less).
_LEAST_REAP_TIMEOUT = 30.0
#: Seconds for a server that has just answered another request.
_PROBE_TIMEOUT = 30.0


#: Of ``LMCacheMPWorkerAdapter``, what is used here (0.5.4, 0.5.5, 0.5.6).
_OF_THE_ADAPTER = (
    *("store_futures", "transfer_ctx", "instance_id", "is_healthy"),
    *("_ensure_heartbeat_started", "_heartbeat", "_heartbeat_interval"),
    *("_health_event", "_mq_timeout"),
)


def require_adapter(adapter: Any) -> None:
    """Refuse an LMCache whose worker adapter is another.

    Raises:
        RuntimeError: It lacks something that is used here.
    """
    missing = [name for name in _OF_THE_ADAPTER if not hasattr(adapter, name)]
    if missing:
        raise RuntimeError(
            f"this LMCache has changed: {type(adapter).__name__} has no {', '.join(missing)}, on "
            f"which this connector relies. Install LMCache {versions.TESTED[-1]}, or name LMCache's "
            "own connector, LMCacheMPConnector, in --kv-transfer-config"
        )


class UnsettledStores(dict[str, Any]):
    """The stores of a worker by request: one entry a request, over when all its stores are.

    What: replaces ``LMCacheMPWorkerAdapter.store_futures``. A second store of a request is joined
    to the first one instead of replacing it, and a drain (``keys`` then ``clear``, which LMCache
    does while its server does not answer) spares the stores that are still running.
    Why: a request that is reported finished gives its blocks back. If one of its stores is still
    reading them, and its commit still arrives, the server publishes another request's KV under
    this request's key.
    Versions: 0.5.4, 0.5.5, 0.5.6.
    Obsolete: once LMCache keeps every store of a request until it is over.
    """

    def __setitem__(self, request_id: str, store: Any) -> None:
        earlier = self.get(request_id)
        super().__setitem__(request_id, store if earlier is None else _Both(earlier, store))

    def keys(self) -> Any:
        """The requests whose stores are all over."""
        return [request_id for request_id, store in self.items() if store.query()]

    def clear(self) -> None:
        """Forget the stores that are over."""
        for request_id in self.keys():
            del self[request_id]


class _Both:
    """Two futures as one: over when both are, true when both are."""

    def __init__(self, first: Any, second: Any) -> None:
        self._stores = (first, second)

    def query(self) -> bool:
        return all(store.query() for store in self._stores)

    def result(self, timeout: float | None = None) -> bool:
        # Both are asked, so that a failure of either is logged by LMCache as ever.
        results = [store.result(timeout=timeout) for store in self._stores]
        return all(results)


def keep_stores(adapter: Any) -> None:
    """Let a worker's adapter keep every store until it is over; before the first store."""
    adapter.store_futures = UnsettledStores(adapter.store_futures)


def flush_while_unreachable(adapter: Any) -> None:
    """Wait until no store reads a block, though the server does not answer.

    What: ``flush_inflight_stores`` of the transfer context.
    Why: LMCache's hook returns at once in that state. Its server may only have been slow, and then
    commits what the gather found in blocks that were already someone else's.
    Versions: 0.5.4, 0.5.5, 0.5.6.
    Obsolete: once LMCache's own hook waits.
    """
    if not adapter.is_healthy and adapter.transfer_ctx is not None:
        adapter.transfer_ctx.flush_inflight_stores()


def start_heartbeat(adapter: Any) -> None:
    """Ping the server from registration on, and recover from a silence that it may have noticed.

    What: LMCache's own heartbeat, which it starts at the first store or retrieve; each beat that
    comes very late takes the server for lost, so that LMCache's own recovery registers again.
    Why: the server drops a worker that never pinged after its registration grace (an hour), and one
    that stopped pinging, as in a compile that holds the interpreter, after its reap timeout. It
    never answers the requests of a worker it has dropped: each load then stops the engine for
    LMCache's time-out of minutes, and nothing registers the worker again.
    Versions: 0.5.4, 0.5.5, 0.5.6.
    Obsolete: once LMCache starts it at registration, and its ping tells whether it is registered.
    """
    adapter._ensure_heartbeat_started()
    heartbeat = adapter._heartbeat
    if getattr(heartbeat, "lmcache_rbln_watched", False):
        return
    heartbeat.lmcache_rbln_watched = True
    beat = heartbeat._execute

    def watched_beat() -> Any:
        suspect_silence(adapter)
        return beat()

    heartbeat._execute = watched_beat


def suspect_silence(adapter: Any) -> None:
    """Take the server for lost if the last beat of the heartbeat is too long ago.

    At the start of a step and of a beat, whichever comes first after a silence.
    """
    heartbeat = adapter._heartbeat
    last = 0.0 if heartbeat is None else heartbeat.last_run_time
    silence = time.time() - last
    if last and silence > _LEAST_REAP_TIMEOUT + adapter._heartbeat_interval and adapter.is_healthy:
        logger.warning(
            "this worker was silent for %.0f s, and the LMCache server may have dropped it; "
            "registering again",
            silence,
        )
        adapter._health_event.clear()


def unregister(adapter: Any) -> None:
    """Take a worker's registration back, so that other caches can be registered.

    What: what the adapter does at its shutdown, and no more.
    Why: LMCache has no hook for caches that are replaced; a second registration would leave the
    first one's threads and shared memory behind.
    Versions: 0.5.4, 0.5.5, 0.5.6.
    Obsolete: once the adapter can replace its caches.
    """
    context, adapter.transfer_ctx = adapter.transfer_ctx, None
    if context is None:
        return
    context.flush_inflight_stores()
    try:
        answer = requests.ask(adapter, requests.UNREGISTER, adapter.instance_id)
        if not answer.wait(adapter._mq_timeout):
            logger.warning("the LMCache server did not confirm that the old KV caches are gone")
    finally:
        context.close()


def serves_engine_driven(adapter: Any) -> bool:
    """Whether the server answers an engine-driven request.

    What: ``requests.UNREGISTER``, for a worker that has no registration: it costs the server one
    line in its log.
    Why: a server without that mode never answers such a request, and LMCache would find out at
    registration, after the model has been compiled, when its time-out of minutes has passed.
    Versions: 0.5.4, 0.5.5, 0.5.6.
    Obsolete: once a server says which modes it serves.
    """
    answer = requests.ask(adapter, requests.UNREGISTER, adapter.instance_id)
    return bool(answer.wait(min(adapter._mq_timeout, _PROBE_TIMEOUT)))


def set_progress(trackers: dict[str, Any], scheduler_output: Any) -> None:
    """Tell LMCache how much of each scheduled request has been computed.

    What: ``num_scheduled_tokens`` of each tracker, to which LMCache adds this step's tokens and
    the larger of the two hit counts to know what it may store.
    Why: that sum is wrong where the hit was not loaded: a failed load after a local hit, a
    connector beside this one that loads less than LMCache had found. LMCache would then store
    blocks that are allocated but not computed, under the right key. vLLM says at every step how
    many tokens are computed; with large blocks, allocation is no second line of defence.
    Versions: 0.5.4, 0.5.5, 0.5.6.
    Obsolete: once LMCache takes ``num_computed_tokens`` from the scheduler's output.
    """
    new = ((r.req_id, r.num_computed_tokens) for r in scheduler_output.scheduled_new_reqs)
    cached = scheduler_output.scheduled_cached_reqs
    running = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    for request_id, computed in (*new, *running):
        tracker = trackers[request_id]
        hit = max(tracker.num_vllm_hit_tokens, tracker.num_lmcache_hit_tokens)
        tracker.num_scheduled_tokens = computed - hit


@dataclass
class LoadsInFlight:
    """Scheduler side: the requests whose load has been sent out and not been reported back.

    What: a request that ends while its load is in flight is noted, and named to the workers with
    the metadata of the step that tells them of its end; they do not report it as sent.
    Why: vLLM frees such a request when the load is reported. LMCache reports it as sent as well,
    and vLLM's scheduler asserts that it still knows the request: the engine dies.
    Versions: LMCache 0.5.4, 0.5.5, 0.5.6 with vLLM 0.30.
    Obsolete: once LMCache reports each request once.
    """

    _loading: set[str] = field(default_factory=set)
    _abandoned: set[str] = field(default_factory=set)

    def send(self, metadata: Any) -> None:
        """Note the loads that this step's metadata orders, and name the abandoned ones in it."""
        self._loading.update(
            request.request_id for request in metadata.requests if request.direction == "RETRIEVE"
        )
        metadata.rbln_abandoned_loads = frozenset(self._abandoned)
        self._abandoned.clear()

    def report(self, finished: Iterable[str] | None) -> None:
        """Note the loads that workers report as over."""
        self._loading.difference_update(finished or ())

    def abandon(self, request_id: str) -> bool:
        """Note the end of a request; whether its load was in flight."""
        if request_id not in self._loading:
            return False
        self._loading.discard(request_id)
        self._abandoned.add(request_id)
        return True


def abandoned_loads(metadata: Any) -> frozenset[str]:
    """Worker side: the requests named by ``LoadsInFlight.send``."""
    return getattr(metadata, "rbln_abandoned_loads", frozenset())
