# SPDX-License-Identifier: Apache-2.0
"""What the end-to-end tests are made of."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

from lmcache_rbln.cli._known_kv import Geometry
from lmcache_rbln.cli._worker_process import WorkerFailed, WorkerProcess
from lmcache_rbln.lmcache_compat.server_process import LMCacheServer

CHUNK = 64
TRANSPORTS = ("shared memory", "pickle")


_requests = itertools.count()


def new_request() -> str:
    """A request id of its own, as an engine's: a session belongs to one request of one model."""
    return f"request {next(_requests)}"


def small(
    layout: str, *, block_size: int = 16, dtype: str = "bfloat16", blocks: int = 24
) -> Geometry:
    """A small cache: enough blocks for several chunks twice over."""
    heads = 1 if layout == "mla" else 2
    return Geometry(layout, 3, blocks, heads, block_size, 24 if layout == "mla" else 8, dtype)


def scattered(geometry: Geometry, tokens: int, seed: int = 0) -> tuple[list[int], list[int]]:
    """Two disjoint lists of blocks for so many tokens, in random order."""
    count = tokens // geometry.block_size
    blocks = random.Random(seed).sample(range(geometry.blocks), 2 * count)
    return blocks[:count], blocks[count:]


@dataclass
class Worker:
    """A worker process with a cache registered for one test."""

    process: WorkerProcess
    server: LMCacheServer
    geometry: Geometry
    tokens: list[int]
    seed: int = 1
    request: str = ""
    placed: list[tuple[int, int]] = field(default_factory=list)

    def call(self, command: str, **arguments):
        try:
            return self.process.call(command, **arguments)
        except WorkerFailed as error:
            log = self.server.log_tail(60)
            raise WorkerFailed(f"{error}\nThe server's log ends:\n{log}") from error

    def write(self, blocks: list[int], first_token: int = 0) -> None:
        """Wipe the cache, then put known content into blocks, in order from ``first_token`` on."""
        size = self.geometry.block_size
        self.placed = [(block, first_token + i * size) for i, block in enumerate(blocks)]
        self.call("write", seed=self.seed, placed=self.placed)

    def store(self, blocks: list[int], *, start: int = 0, end: int | None = None) -> bool:
        request = new_request()
        done = self.call(
            "store",
            token_ids=self.tokens,
            block_ids=blocks,
            request_id=request,
            start=start,
            end=end,
        )
        self.call("end_session", request_id=request)
        return done["done"]

    def lookup(self, tokens: list[int] | None = None) -> int:
        tokens = self.tokens if tokens is None else tokens
        self.request = new_request()
        return self.call("lookup", token_ids=tokens, request_id=self.request)

    def retrieve(
        self, blocks: list[int], *, start: int = 0, end: int | None = None, skip: int = 0
    ) -> bool:
        done = self.call(
            "retrieve",
            token_ids=self.tokens,
            block_ids=blocks,
            request_id=self.request,
            start=start,
            end=end,
            skip_first_n_tokens=skip,
        )
        self.call("end_session", request_id=self.request)
        return done["done"]

    def difference(self, blocks: list[int], first_token: int = 0) -> str:
        """Compare the whole cache: these blocks hold the tokens from ``first_token`` on."""
        size = self.geometry.block_size
        placed = [(block, first_token + i * size) for i, block in enumerate(blocks)]
        return self.call("difference", seed=self.seed, placed=placed)
