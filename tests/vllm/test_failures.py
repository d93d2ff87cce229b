# SPDX-License-Identifier: Apache-2.0
"""Everything that can go wrong between an engine and its server; wrong KV is never the result."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from vllm_harness import probes
from vllm_harness.engine import CONNECTORS, prompt
from vllm_harness.kv import LAYOUTS, Geometry
from vllm_harness.worker import WrongKVError

CHUNK = 64

every_connector = pytest.mark.parametrize("connector", CONNECTORS)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)

Servers = Callable[[int], str]
Engines = Callable[..., Any]


def expect_defect(
    request: pytest.FixtureRequest,
    connector: str,
    reason: str,
    raises: type[BaseException],
    *,
    always: bool = True,
) -> None:
    """LMCache's own connector fails here; the test fails when it no longer does.

    Unless the defect is a race, and not ``always`` seen.
    """
    if connector == "stock":
        mark = pytest.mark.xfail(strict=always, reason=reason, raises=raises)
        request.node.add_marker(mark)


@every_connector
@every_layout
def test_preemption_with_stores_in_flight(
    mortal_server: Any, engines: Engines, connector: str, layout: str
) -> None:
    """The hook returns only when both stores of the preempted request have been read.

    The server is frozen, so both stores wait for it; the step that preempts must wait with them,
    for it gives the blocks to another request.
    """
    server = mortal_server
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
    server.freeze()
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
    server.thaw()
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
    mortal_server: Any, engines: Engines, layout: str
) -> None:
    """Blocks come back when the last store is over, though the server was taken for dead."""
    server = mortal_server
    extra = {"lmcache.mp.mq_timeout": 30.0, "lmcache.mp.heartbeat_interval": 1.0}
    engine = engines(server.url, Geometry(layout), extra=extra, max_batched_tokens=CHUNK)
    engine.run_one(prompt(20, 20))
    request = engine.add(prompt(21, 128))
    while engine.requests[request].num_computed_tokens < 64:
        engine.step()
    server.freeze()
    deadline = time.monotonic() + 6.0
    while time.monotonic() < deadline:
        engine.step()
        time.sleep(0.05)
    assert request in engine.finished
    assert request in engine.scheduler.requests, "blocks were freed while a store may read them"
    server.thaw()
    engine.run()
    engine.check_over()


@every_connector
@every_layout
def test_a_dead_server_means_recompute(
    mortal_server: Any, engines: Engines, connector: str, layout: str
) -> None:
    """It dies between lookup and load; later it comes back empty, and is used again."""
    engine = engines(
        mortal_server.url,
        Geometry(layout),
        connector=connector,
        extra={"lmcache.mp.mq_timeout": 4.0, "lmcache.mp.heartbeat_interval": 2.0},
    )
    tokens = prompt(30, 200)
    engine.run_one(tokens)
    engine.forget_local_cache()
    request = engine.add(tokens)
    output, rows = engine.schedule_load(request)
    mortal_server.kill()
    engine.send(output, rows)
    engine.receive(output, rows)
    engine.run()
    assert len(engine.generated(request)) == 1
    # Without a server the engine goes on.
    engine.forget_local_cache()
    alone = engine.run_one(tokens)
    assert len(engine.generated(alone)) == 1

    mortal_server.start()
    deadline = time.monotonic() + 30.0
    back: int | None = None
    while not back and time.monotonic() < deadline:
        engine.forget_local_cache()
        back = engine.loaded.get(engine.run_one(tokens))
        time.sleep(0.2)
    assert back == 192, "nothing was loaded after the server had come back"
    engine.check_over()


@every_connector
@every_layout
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_an_evicted_chunk(
    request: pytest.FixtureRequest,
    servers: Servers,
    engines: Engines,
    connector: str,
    layout: str,
    policy: str,
) -> None:
    """A chunk that vanishes between lookup and load: recomputed, or the request fails.

    The chunk is evicted by force, as LMCache's own clear does when its lock has expired.
    """
    if policy == "fail":
        expect_defect(request, connector, "the engine dies of a failed load", AssertionError)
    engine = engines(servers(CHUNK), Geometry(layout), connector=connector, policy=policy)
    tokens = prompt(40, 200)
    engine.run_one(tokens)
    engine.forget_local_cache()
    late = engine.add(tokens)
    output, rows = engine.schedule_load(late)
    engine.workers[0].call("run", probes.forced_clear)
    engine.send(output, rows)
    engine.receive(output, rows)
    engine.run()
    finished = engine.requests[late].status.name
    assert finished == ("FINISHED_LENGTH_CAPPED" if policy == "recompute" else "FINISHED_ERROR")
    # The engine goes on.
    other = engine.run_one(prompt(41, 70))
    assert len(engine.generated(other)) == 1
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 63


@every_connector
@every_layout
def test_a_failed_load_after_a_local_hit_stores_nothing_wrong(
    request: pytest.FixtureRequest,
    servers: Servers,
    engines: Engines,
    connector: str,
    layout: str,
) -> None:
    """Blocks allocated for a load that failed are not stored before they are computed.

    With blocks larger than a step, as on RBLN, a chunk's blocks are allocated long before its
    tokens are computed.
    """
    # Not if the store is so late that the step after it has computed the rest.
    reason = "a chunk is stored before it is computed"
    expect_defect(request, connector, reason, WrongKVError, always=False)
    geometry = Geometry(layout, block_size=128, num_blocks=16)
    engine = engines(servers(128), geometry, connector=connector, max_batched_tokens=64)
    tokens = prompt(50, 600)
    # The server has 384 tokens of it, the engine 128.
    engine.run_one(tokens[:390])
    engine.forget_local_cache()
    engine.run_one(tokens[:130])
    late = engine.add(tokens)
    output, rows = engine.schedule_load(late)
    engine.workers[0].call("run", probes.forced_clear)
    engine.send(output, rows)
    engine.receive(output, rows)
    engine.run()
    # The first run puts back what was evicted, the second loads all that the server has. A store
    # that meets a chunk which the server is about to drop leaves it to the next one.
    for _ in range(4):
        engine.forget_local_cache()
        loaded = engine.loaded.get(engine.run_one(tokens), 0)
        if loaded == 512:
            break
    assert loaded == 512
    engine.check_over()


@every_connector
@every_layout
def test_abort_while_a_load_is_pending(
    request: pytest.FixtureRequest,
    servers: Servers,
    engines: Engines,
    connector: str,
    layout: str,
) -> None:
    """As with an engine that schedules a step ahead: the abort comes before the load's report."""
    expect_defect(request, connector, "the request is reported twice", AssertionError)
    engine = engines(servers(CHUNK), Geometry(layout), connector=connector)
    tokens = prompt(60, 200)
    engine.run_one(tokens)
    engine.forget_local_cache()
    late = engine.add(tokens)
    output, rows = engine.schedule_load(late)
    engine.send(output, rows)
    engine.abort(late)
    ahead = engine.schedule()
    engine.receive(output, rows)
    engine.send(*ahead)
    engine.receive(*ahead)
    engine.run()
    assert late not in engine.scheduler.requests
    reported = [r for report in engine.reports for r in (report.finished_recving or ())]
    assert reported.count(late) == 1
    assert engine.loaded[engine.run_one(tokens)] == 192
    engine.check_over()
