# SPDX-License-Identifier: Apache-2.0
"""Workers that race, and a model of what a server may hold, checked step by step."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lmcache_rbln import simulator
from lmcache_rbln.cli._known_kv import LAYOUTS
from lmcache_rbln.lmcache_compat.server_process import LMCacheServer
from tests.faults.rig import CHUNK, PER_CHUNK, Peer, l1, small


@pytest.mark.parametrize("arguments", [(), ("--faults",)], ids=["delays", "delays and faults"])
def test_eight_threads_on_one_ops_object(arguments):
    seed = os.environ.get("FAULTS_SEED", "1")
    command = [sys.executable, "-m", "tests.faults.stress", "--seed", seed, *arguments]
    done = subprocess.run(command, capture_output=True, check=False, text=True, timeout=280)
    lines = done.stdout[done.stdout.find("stress:") :]
    assert done.returncode == 0, f"{' '.join(command)}\n{lines}\n{done.stderr[-3000:]}"


class Cache(RuleBasedStateMachine):
    """Two workers of a model and their server, against a dictionary.

    The server may forget, but what it serves must be what was stored last under that name, and it
    must not serve what no store has reported.
    """

    server: LMCacheServer
    runs = 0

    def __init__(self) -> None:
        super().__init__()
        self.stored: dict[int, int] = {}  # content: chunks
        self.restarts = 1
        self.peers: list[Peer] = []

    @initialize(layout=st.sampled_from(LAYOUTS))
    def join(self, layout: str) -> None:
        type(self).runs += 1
        self.model = f"model-{self.runs}"
        self.blocks = [24, 24]
        self.layout = layout
        self.peers = [self._peer(0), self._peer(1)]

    def _peer(self, number: int) -> Peer:
        geometry = small(self.layout, blocks=self.blocks[number])
        return Peer(self.server, self.model, geometry, timeout=20)

    def teardown(self) -> None:
        simulator.clear_faults()
        for peer in self.peers:
            peer.close()

    def _store(self, who: int, content: int, chunks: int, data: st.DataObject) -> bool:
        blocks = self._choose(who, chunks, data)
        self.peers[who].write(content, blocks)
        done = self.peers[who].store(content, blocks, chunks=chunks)
        if done:
            self.stored[content] = max(chunks, self.stored.get(content, 0))
        return done

    def _choose(self, who: int, chunks: int, data: st.DataObject) -> list[int]:
        order = data.draw(st.permutations(range(self.blocks[who])))
        return list(order[: chunks * PER_CHUNK])

    who = st.integers(0, 1)
    content = st.integers(1, 5)
    chunks = st.integers(1, 3)

    @rule(who=who, content=content, chunks=chunks, data=st.data())
    def store(self, who: int, content: int, chunks: int, data: st.DataObject) -> None:
        assert self._store(who, content, chunks, data)
        assert self.peers[1 - who].hits(content, chunks) == chunks

    @rule(who=who, content=content, chunks=chunks, at=st.integers(1, 8), data=st.data())
    def fail_to_store(
        self, who: int, content: int, chunks: int, at: int, data: st.DataObject
    ) -> None:
        blocks = self._choose(who, chunks, data)
        self.peers[who].write(content, blocks)
        simulator.inject(f"any@{at}=lost")
        try:
            done = self.peers[who].store(content, blocks, chunks=chunks)
        finally:
            simulator.clear_faults()
        if done:
            self.stored[content] = max(chunks, self.stored.get(content, 0))

    @rule(who=who, content=content, chunks=chunks, data=st.data())
    def retrieve(self, who: int, content: int, chunks: int, data: st.DataObject) -> None:
        blocks, peer = self._choose(who, chunks, data), self.peers[who]
        peer.write(0, [])
        got = peer.retrieve(content, blocks, chunks=chunks)
        if got is None:
            assert peer.difference(0, []) == ""
            return
        assert got is True
        assert chunks <= self.stored.get(content, 0), "served what no store has reported"
        assert peer.difference(content, blocks) == ""

    @rule(content=content)
    def look_up(self, content: int) -> None:
        hits = {peer.hits(content, 3) for peer in self.peers}
        assert len(hits) == 1
        assert hits.pop() <= self.stored.get(content, 0)

    @rule()
    def evict(self) -> None:
        self.peers[0].client.clear()
        self.stored.clear()
        assert l1(self.server).objects == 0

    @rule(who=who, blocks=st.sampled_from([16, 24, 40]))
    def resize(self, who: int, blocks: int) -> None:
        self.peers[who].close()
        self.blocks[who] = blocks
        self.peers[who] = self._peer(who)

    @precondition(lambda self: self.restarts > 0)
    @rule()
    def restart_the_server(self) -> None:
        self.restarts -= 1
        self.server.kill()
        self.server.start()
        self.stored.clear()
        for who, peer in enumerate(self.peers):
            peer.client.timeout = 0.5  # The new server does not know the worker that leaves.
            peer.close()
            self.peers[who] = self._peer(who)


def test_model():
    """Each example may restart the server once."""
    with LMCacheServer(
        chunk_size=CHUNK, pool_gb=0.05, arguments=["--max-workers", "2"]
    ) as Cache.server:
        run_state_machine_as_test(
            Cache,
            settings=settings(
                max_examples=int(os.environ.get("FAULTS_EXAMPLES", "4")),
                stateful_step_count=40,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
