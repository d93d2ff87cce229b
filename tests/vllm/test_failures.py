# SPDX-License-Identifier: Apache-2.0
"""Everything that can go wrong between an engine and its server; wrong KV is never the result."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from vllm_harness.engine import CONNECTORS, QUICK, prompt
from vllm_harness.kv import LAYOUTS, Geometry

from lmcache_rbln.lmcache_compat.worker import WorkerClient

CHUNK = 64

every_connector = pytest.mark.parametrize("connector", CONNECTORS)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)

Servers = Callable[[int], str]
Engines = Callable[..., Any]


def freeze(server: Any) -> None:
    """Stop the server process where it stands: requests stay unanswered."""
    os.kill(server.pid, signal.SIGSTOP)


def thaw(server: Any) -> None:
    os.kill(server.pid, signal.SIGCONT)


def thaw_in(server: Any, seconds: float) -> threading.Timer:
    timer = threading.Timer(seconds, thaw, [server])
    timer.start()
    return timer


def held(client: WorkerClient, tokens: list[int]) -> int:
    """Tokens of a prompt that the server still holds once all that is not locked is dropped."""
    client.clear()
    found = client.lookup(tokens, request_id=f"held-{time.monotonic_ns()}")
    if found:
        client.free_lookup(tokens, request_id="held", end=found)
    return found


@every_connector
@every_layout
def test_preemption_with_stores_in_flight(
    own_server: Callable[..., Any], engines: Engines, connector: str, layout: str
) -> None:
    """The hook returns only when both stores of the preempted request have been read.

    The server is frozen, so both stores wait for it; the step that preempts must wait with them,
    for it gives the blocks to another request.
    """
    server = own_server(chunk_size=CHUNK)
    slow = {"lmcache.mp.mq_timeout": 60.0, "lmcache.mp.heartbeat_interval": 20.0}
    # 11 usable blocks of 16: two requests of 64 and more tokens each do not fit for long.
    engine = engines(
        server.url,
        Geometry(layout, num_blocks=16),
        connector=connector,
        extra=slow,
        max_batched_tokens=CHUNK,
    )
    # Heartbeat and lookups have their answers before the server is frozen.
    engine.run_one(prompt(9, 20))
    older = engine.add(prompt(10, 60), max_tokens=60)
    younger = engine.add(prompt(11, 128), max_tokens=40)
    while engine.requests[younger].num_computed_tokens < 64:
        engine.step()
    freeze(server)
    engine.step()
    assert engine.requests[younger].num_computed_tokens >= 128
    while True:
        output, rows = engine.schedule()
        engine.send(output, rows)
        if output.preempted_req_ids:
            break
        engine.receive(output, rows)
    assert output.preempted_req_ids == {younger}
    assert not engine.workers[0].answered(1.0), "the blocks were given away under the stores"
    thaw(server)
    engine.receive(output, rows)
    engine.run()
    assert engine.preemptions >= 1
    assert len(engine.generated(older)) == 60
    # What was stored is right: another engine's worth of checks.
    engine.forget_local_cache()
    assert engine.loaded[engine.run_one(prompt(11, 128))] == 127
    engine.check_over()


@every_layout
def test_all_stores_of_a_request_are_waited_for(
    own_server: Callable[..., Any], engines: Engines, layout: str
) -> None:
    """Blocks come back when the last store is over, though the server was taken for dead."""
    server = own_server(chunk_size=CHUNK)
    extra = {"lmcache.mp.mq_timeout": 30.0, "lmcache.mp.heartbeat_interval": 1.0}
    engine = engines(server.url, Geometry(layout), extra=extra, max_batched_tokens=CHUNK)
    engine.run_one(prompt(20, 20))
    request = engine.add(prompt(21, 128))
    while engine.requests[request].num_computed_tokens < 64:
        engine.step()
    freeze(server)
    deadline = time.monotonic() + 6.0
    while time.monotonic() < deadline:
        engine.step()
        time.sleep(0.05)
    assert request in engine.finished
    assert request in engine.scheduler.requests, "blocks were freed while a store may read them"
    thaw(server)
    engine.run()
    engine.check_over()


@every_connector
@every_layout
def test_a_dead_server_means_recompute(
    own_server: Callable[..., Any], engines: Engines, connector: str, layout: str
) -> None:
    """Between the lookup and the load; then the server comes back empty and is used again."""
    server = own_server(chunk_size=CHUNK)
    engine = engines(
        server.url,
        Geometry(layout),
        connector=connector,
        extra={"lmcache.mp.mq_timeout": 2.0},
    )
    tokens = prompt(30, 200)
    engine.run_one(tokens)
    engine.forget_local_cache()
    request = engine.add(tokens)
    while not engine.loaded.get(request):
        output, rows = engine.schedule()
        if engine.loaded.get(request):
            server.kill()
        engine.send(output, rows)
        engine.receive(output, rows)
    engine.run()
    assert len(engine.generated(request)) == 1
    assert engine.requests[request].num_computed_tokens >= 200
    # Without a server the engine goes on.
    engine.forget_local_cache()
    alone = engine.run_one(tokens)
    assert len(engine.generated(alone)) == 1
    engine.check_over()


@every_connector
@every_layout
def test_server_restart(
    own_server: Callable[..., Any], engines: Engines, connector: str, layout: str
) -> None:
    server = own_server(chunk_size=CHUNK)
    engine = engines(server.url, Geometry(layout), connector=connector)
    tokens = prompt(31, 200)
    engine.run_one(tokens)
    port = server.url.rsplit(":", 1)[1]
    server.kill()
    server.stop()
    time.sleep(2.5)  # Two heartbeats: both sides know.
    engine.forget_local_cache()
    engine.run_one(tokens)
    own_server(chunk_size=CHUNK, arguments=["--port", port])
    deadline = time.monotonic() + 30.0
    while time.monotonic() < deadline:
        engine.forget_local_cache()
        if engine.loaded.get(engine.run_one(tokens)):
            break
        time.sleep(0.5)
    else:
        pytest.fail("nothing was loaded again after the server came back")
    engine.check_over()


@every_connector
@every_layout
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_an_evicted_chunk(
    servers: Servers, engines: Engines, connector: str, layout: str, policy: str
) -> None:
    """A chunk that vanishes between lookup and load: recomputed, or the request fails.

    The chunk is evicted by force, as LMCache's own clear does when its lock has expired.
    """
    engine = engines(servers(CHUNK), Geometry(layout), connector=connector, policy=policy)
    tokens = prompt(40, 200)
    engine.run_one(tokens)
    engine.forget_local_cache()
    request = engine.add(tokens)
    output, rows = engine.schedule()
    while not engine.loaded.get(request):
        engine.send(output, rows)
        engine.receive(output, rows)
        output, rows = engine.schedule()
    engine.workers[0].call("run", forced_clear)
    engine.send(output, rows)
    engine.receive(output, rows)
    engine.run()
    finished = engine.requests[request].status.name
    assert finished == ("FINISHED_LENGTH_CAPPED" if policy == "recompute" else "FINISHED_ERROR")
    # The engine goes on.
    other = engine.run_one(prompt(41, 70))
    assert len(engine.generated(other)) == 1
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 63


def forced_clear(runner: Any) -> None:
    """Drop everything the server holds, locked or not."""
    runner.adapter().req_client.clear(force=True).result(timeout=10)


@every_connector
@every_layout
def test_a_failed_load_after_a_local_hit_stores_nothing_wrong(
    own_server: Callable[..., Any], engines: Engines, connector: str, layout: str
) -> None:
    """Blocks allocated for a load that failed are not stored before they are computed.

    With blocks larger than a step, as on RBLN, a chunk's blocks are allocated long before its
    tokens are computed.
    """
    server = own_server(chunk_size=128)
    geometry = Geometry(layout, block_size=128, num_blocks=16)
    engine = engines(server.url, geometry, connector=connector, max_batched_tokens=64)
    tokens = prompt(50, 600)
    # The server has 384 tokens of it, the engine 128.
    engine.run_one(tokens[:390])
    engine.forget_local_cache()
    engine.run_one(tokens[:130])
    request = engine.add(tokens)
    output, rows = engine.schedule()
    while not engine.loaded.get(request):
        engine.send(output, rows)
        engine.receive(output, rows)
        output, rows = engine.schedule()
    engine.workers[0].call("run", forced_clear)
    engine.send(output, rows)
    engine.receive(output, rows)
    engine.run()
    # Whatever the server holds of it now is right.
    engine.forget_local_cache()
    again = engine.run_one(tokens)
    assert len(engine.generated(again)) == 1
    engine.check_over()


@every_connector
@every_layout
def test_abort_while_a_load_is_pending(
    servers: Servers, engines: Engines, connector: str, layout: str
) -> None:
    """As with an engine that schedules a step ahead: the abort comes before the load's report."""
    if connector == "stock":
        pytest.xfail("LMCache reports the request twice, and vLLM's scheduler asserts")
    engine = engines(servers(CHUNK), Geometry(layout), connector=connector)
    tokens = prompt(60, 200)
    engine.run_one(tokens)
    engine.forget_local_cache()
    request = engine.add(tokens)
    output, rows = engine.schedule()
    while not engine.loaded.get(request):
        engine.send(output, rows)
        engine.receive(output, rows)
        output, rows = engine.schedule()
    engine.send(output, rows)
    engine.abort(request)
    ahead = engine.schedule()
    engine.receive(output, rows)
    engine.send(*ahead)
    engine.receive(*ahead)
    engine.run()
    assert request not in engine.scheduler.requests
    reported = [r for report in engine.reports for r in (report.finished_recving or ())]
    assert reported.count(request) == 1
    assert engine.loaded[engine.run_one(tokens)] == 192
    engine.check_over()
