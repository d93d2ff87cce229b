# SPDX-License-Identifier: Apache-2.0
"""No chunk that was never written is served, by a real server, whatever became of its writer."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict

import lmcache  # noqa: F401  # Its registry must start before the modules that it loads.
import pytest

from lmcache_rbln import simulator
from lmcache_rbln.cli._worker_process import WorkerProcess
from lmcache_rbln.lmcache_compat import guard_protocol, worker_guard
from lmcache_rbln.lmcache_compat.server_process import LMCacheServer
from tests.faults.rig import (
    BLOCKS,
    CHUNK,
    CHUNKS,
    INTO,
    PER_CHUNK,
    Peer,
    expect_exact,
    l1,
    small,
    status,
    token_ids,
)

#: Seconds: the least that LMCache takes for reaping, and a write lock that a test can outlast.
REAP, WRITE_LOCK = 30, 6


def with_guard(value: str) -> dict[str, str]:
    return {**os.environ, "LMCACHE_RBLN_GUARD": value}


@pytest.fixture(scope="module")
def guarded() -> Iterator[LMCacheServer]:
    arguments = [
        *("--max-workers", "2", "--l1-write-ttl-seconds", str(WRITE_LOCK)),
        *("--worker-reap-timeout-seconds", str(REAP)),
        *("--worker-registration-grace-seconds", str(REAP)),
    ]
    with LMCacheServer(
        chunk_size=CHUNK, pool_gb=0.05, arguments=arguments, environment=with_guard("1")
    ) as server:
        yield server


@pytest.fixture(params=["sync", "async"])
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def peer(peer: Callable[..., Peer], guarded: LMCacheServer) -> Callable[..., Peer]:
    """The same; by default on the guarded server."""
    return lambda server=guarded, **options: peer(server, **options)


def fail_a_store(writer: Peer, content: int = 1) -> None:
    writer.write(content, BLOCKS)
    simulator.inject("any@1=lost")
    assert writer.store(content, BLOCKS, chunks=CHUNKS) is False
    simulator.clear_faults()


def test_the_server_says_that_it_is_guarded(guarded):
    assert guard_protocol.STATUS_FIELD in status(guarded)


def test_a_failed_gather_gives_its_reservation_up_at_once(guarded, peer, mode):
    writer, reader = peer(mode=mode), peer(mode=mode)
    before = l1(guarded)
    fail_a_store(writer)
    assert l1(guarded) == before
    assert reader.hits(1, CHUNKS) == 0
    writer.close()
    assert reader.hits(1, CHUNKS) == 0, "the server published what was never written"


def test_a_retry_stores(peer, mode):
    writer, reader = peer(mode=mode), peer()
    fail_a_store(writer)
    assert writer.store(1, BLOCKS, chunks=CHUNKS) is True
    expect_exact(reader)


def test_another_worker_may_store_after_a_failure(peer):
    writer, reader = peer(), peer()
    fail_a_store(writer)
    reader.write(1, BLOCKS)
    assert reader.store(1, BLOCKS, chunks=CHUNKS) is True
    writer.close()
    expect_exact(reader)


def prepare(writer: Peer, content: int = 1) -> None:
    """Reserve, as a store does, and go no further."""
    client = writer.client
    key = client._key(token_ids(content, CHUNKS), 0, CHUNKS * CHUNK, "prepared", worker_id=0)
    context = client.transfer_context.engine_driven_context
    assert len(context.prepare_store(key, client.instance_id)[1]) == CHUNKS
    # As if the thread had gone away: the worker's guard must not see the end of it.
    worker_guard._open.store = None


def test_what_a_worker_left_reserved_is_discarded_when_it_unregisters(guarded, peer):
    writer, reader = peer(), peer()
    before = l1(guarded)
    prepare(writer)
    assert l1(guarded).write_locked == before.write_locked + CHUNKS
    writer.close()
    assert l1(guarded) == before
    assert reader.hits(1, CHUNKS) == 0
    reader.write(1, BLOCKS)
    assert reader.store(1, BLOCKS, chunks=CHUNKS) is True
    expect_exact(reader)


def test_other_workers_writes_are_left_alone(peer):
    leaving, writer = peer(), peer()
    prepare(leaving, content=1)
    writer.write(2, BLOCKS)
    simulator.inject("v2h@1=hang=1.5")
    pending = writer.client.submit_store(token_ids(2, CHUNKS), BLOCKS, request_id="slow")
    leaving.close()
    assert pending.result() is True
    expect_exact(writer, content=2)


def test_a_store_that_outlasts_its_write_lock_fails_and_is_not_served(peer, mode):
    writer, reader = peer(mode=mode), peer()
    writer.write(1, BLOCKS)
    simulator.inject(f"v2h@1=hang={WRITE_LOCK + 1}")
    assert writer.store(1, BLOCKS, chunks=CHUNKS) is False
    assert reader.hits(1, CHUNKS) == 0
    assert writer.store(1, BLOCKS, chunks=CHUNKS) is True
    expect_exact(reader)


def test_a_write_lock_that_ran_out_publishes_nothing(peer):
    writer, reader = peer(), peer()
    prepare(writer)
    time.sleep(WRITE_LOCK + 1)
    assert reader.hits(1, CHUNKS) == 0
    assert writer.store(1, BLOCKS, chunks=CHUNKS) is True


def test_a_store_cannot_end_another_of_the_same_range(guarded, peer):
    writer, reader = peer(), peer()
    client = writer.client
    prepare(writer)
    key = client._key(token_ids(1, CHUNKS), 0, CHUNKS * CHUNK, "late", worker_id=0)
    stale = worker_guard._Store(
        client.transfer_context.engine_driven_context, key, client.instance_id
    )
    stale.reservation = guard_protocol.new_reservation()
    for ending in (guard_protocol.WRITTEN, guard_protocol.GIVE_UP):
        assert worker_guard._end(stale, ending, 10) is False
    assert reader.hits(1, CHUNKS) == 0
    assert l1(guarded).write_locked >= CHUNKS


def test_200_failures_on_a_pool_of_256_chunks(start):
    server = start(pool_gb=256 * 12288 / 2**30, environment=with_guard("1"))
    with Peer(server, "many", small("kv_first")) as writer:
        writer.write(1, BLOCKS)
        for content in range(1, 201):
            simulator.inject("any@1=lost")
            assert writer.store(content, BLOCKS, chunks=CHUNKS) is False
            simulator.clear_faults()
        assert l1(server).objects == 0
        assert l1(server).used == 0
        for content in range(1, 51):
            assert writer.hits(content, CHUNKS) == 0
            writer.write(content, BLOCKS)
            assert writer.store(content, BLOCKS, chunks=CHUNKS) is True
        for content in range(1, 51):
            expect_exact(writer, content)


def test_a_server_without_the_guard(start, peer, caplog, monkeypatch):
    """What the guard is for: if this fails because nothing is served, it has become obsolete."""
    monkeypatch.setattr(worker_guard, "_warned", False)
    logger = worker_guard._logger()  # LMCache takes the handlers off a logger that it makes.
    logger.addHandler(caplog.handler)
    server = start(environment=with_guard("0"))
    try:
        assert guard_protocol.STATUS_FIELD not in status(server)
        writer, reader = peer(server), peer(server)
        for content in (1, 2):
            fail_a_store(writer, content)
        warnings = [one for one in caplog.records if "not guarded" in one.getMessage()]
        assert len(warnings) == 1
        # The chunks stay reserved: a store that has them in its range was not a success.
        assert writer.store(1, BLOCKS, chunks=CHUNKS) is False
        assert writer.store(1, [*BLOCKS, *INTO[:PER_CHUNK]], chunks=CHUNKS + 1) is False
        assert writer.store(1, BLOCKS[:PER_CHUNK], chunks=CHUNKS + 1, start=CHUNKS) is True
        writer.close()
        assert reader.hits(2, CHUNKS) == CHUNKS, "LMCache publishes no unfinished writes any more"
        assert reader.retrieve(2, INTO, chunks=CHUNKS) is True
        assert reader.difference(2, INTO) != ""
        reader.close()
    finally:
        logger.removeHandler(caplog.handler)


def killed(fault: str) -> WorkerProcess:
    """A worker process that will hang at the call that ``fault`` names."""
    environment = simulator.environment(faults=fault, host=simulator.unique_host("killed"))
    # Its scratch copies would be counted too.
    return WorkerProcess("killed", environment={**environment, "LMCACHE_RBLN_SELF_CHECK": "0"})


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def test_workers_killed_in_the_middle_of_a_transfer_leave_nothing(guarded):
    wiped = small("kv_first").layers  # copies to the NPU before the first of the retrieve
    with (
        Peer(guarded, "killed", small("kv_first")) as reader,
        killed("v2h@1=hang=600") as storing,
        killed(f"h2v@{wiped + 1}=hang=600") as retrieving,
    ):
        reader.write(8, BLOCKS)
        assert reader.store(8, BLOCKS, chunks=CHUNKS) is True
        for process in (storing, retrieving):
            process.call("connect", url=guarded.url, model_name="killed")
            process.call("register", geometry=asdict(small("kv_first")))
        wait_for(lambda: l1(guarded).write_locked == 0, 2 * WRITE_LOCK, "locks of other tests")
        before = l1(guarded)
        old = {"token_ids": token_ids(8, CHUNKS), "request_id": "old"}
        new = {"token_ids": token_ids(9, CHUNKS), "request_id": "new"}
        assert retrieving.call("lookup", **old)
        retrieving.begin("retrieve", block_ids=BLOCKS, **old)
        time.sleep(3)  # Nothing shows from outside that it has begun.
        storing.begin("store", block_ids=BLOCKS, **new)
        wait_for(lambda: l1(guarded).write_locked == CHUNKS, 30, "the store never began")
        assert l1(guarded).read_locked == before.read_locked + CHUNKS
        storing.kill()
        retrieving.kill()

        def both_reaped() -> bool:
            reader.client.ping()  # or it would be reaped with them
            assert reader.hits(9, CHUNKS) == 0
            return guarded.log_tail(10_000).count("Reaped non-GPU instance") == 2

        # Between one and one and a quarter time-outs after the last sign of life.
        wait_for(both_reaped, 1.25 * REAP + 5, "the workers were not reaped")
        assert reader.hits(9, CHUNKS) == 0
        after = l1(guarded)
        assert (after.write_locked, after.read_locked) == (0, 0)
        expect_exact(reader, 8)
        reader.write(9, BLOCKS)
        assert reader.store(9, BLOCKS, chunks=CHUNKS) is True
        expect_exact(reader, 9)
