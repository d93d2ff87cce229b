# SPDX-License-Identifier: Apache-2.0
"""A worker in this process whose every byte is known, and what its server says of itself."""

from __future__ import annotations

import http.client
import itertools
import json
from dataclasses import dataclass
from typing import Any

from lmcache_rbln.cli._known_kv import Geometry, KnownCache
from lmcache_rbln.lmcache_compat.server_process import LMCacheServer
from lmcache_rbln.lmcache_compat.worker import StoreMode, WorkerClient

CHUNK = 64
BLOCK = 16
PER_CHUNK = CHUNK // BLOCK

#: A content of a few chunks, and where a test puts it: stored from BLOCKS, retrieved to INTO.
CHUNKS = 3
BLOCKS = list(range(CHUNKS * PER_CHUNK))
INTO = list(range(23, 23 - len(BLOCKS), -1))

_requests = itertools.count()


def small(layout: str, *, layers: int = 3, blocks: int = 24) -> Geometry:
    """A cache of a few chunks: 64 tokens are 12 KiB, or 9 KiB for MLA."""
    heads, width = (1, 24) if layout == "mla" else (2, 8)
    return Geometry(layout, layers, blocks, heads, BLOCK, width)


def token_ids(content: int, chunks: int) -> list[int]:
    """Tokens that name a content, of 32 bits; no two contents share a chunk."""
    return [content * 1024 + position for position in range(chunks * CHUNK)]


class Peer:
    """A worker of a server, with a KV cache on a simulated NPU of this process.

    Args:
        server: The server.
        model: Peers of one model share chunks.
        geometry: Of the cache; layouts and block sizes may differ between peers.
        mode: ``sync`` or ``async`` stores.
        device: torch's name of the NPU.
        timeout: Seconds to wait for the server.
    """

    def __init__(
        self,
        server: LMCacheServer,
        model: str,
        geometry: Geometry,
        *,
        mode: str = "async",
        device: str = "rbln:0",
        timeout: float = 30.0,
    ) -> None:
        self.geometry = geometry
        self.cache = KnownCache(geometry, device)
        self.client = WorkerClient(server.url, model_name=model, timeout=timeout)
        try:
            self.register(mode)
        except BaseException:
            self.client.close()
            raise

    def register(self, mode: str = "async") -> None:
        self.client.register(
            self.cache.layers, block_size=self.geometry.block_size, store_mode=StoreMode(mode)
        )

    def placed(self, blocks: list[int], first_token: int = 0) -> list[tuple[int, int]]:
        size = self.geometry.block_size
        return [(block, first_token + index * size) for index, block in enumerate(blocks)]

    def write(self, content: int, blocks: list[int], first_token: int = 0) -> None:
        """Wipe the cache and put a content's tokens into blocks."""
        self.cache.write(content, self.placed(blocks, first_token))

    def store(self, content: int, blocks: list[int], *, chunks: int, start: int = 0) -> bool:
        """Store chunks ``start`` to ``chunks`` of a content out of blocks."""
        request = f"s{next(_requests)}"
        done = self.client.store(
            token_ids(content, chunks), blocks, request_id=request, start=start * CHUNK
        )
        self.client.end_session(request)
        return done

    def hits(self, content: int, chunks: int) -> int:
        """Chunks of a content that the server holds; no lock is kept."""
        request, tokens = f"l{next(_requests)}", token_ids(content, chunks)
        found = self.client.lookup(tokens, request_id=request)
        if found:
            self.client.free_lookup(tokens, request_id=request, end=found)
        self.client.end_session(request)
        return found // CHUNK

    def retrieve(self, content: int, blocks: list[int], *, chunks: int) -> bool | None:
        """Look up and retrieve; None if the lookup found less than all chunks."""
        request, tokens = f"r{next(_requests)}", token_ids(content, chunks)
        found = self.client.lookup(tokens, request_id=request)
        if found < chunks * CHUNK:
            if found:
                self.client.free_lookup(tokens, request_id=request, end=found)
            self.client.end_session(request)
            return None
        done = self.client.retrieve(tokens, blocks, request_id=request)
        self.client.end_session(request)
        return done

    def difference(self, content: int, blocks: list[int], first_token: int = 0) -> str:
        """Compare the whole cache: "" if these blocks hold the content and all others nothing."""
        return self.cache.difference(content, self.placed(blocks, first_token))

    def close(self) -> None:
        self.client.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class L1:
    """The server's pool: objects and their locks."""

    objects: int
    write_locked: int
    read_locked: int
    used: int


def status(server: LMCacheServer) -> dict[str, Any]:
    """The server's status page."""
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=10)
    try:
        connection.request("GET", "/status")
        page: dict[str, Any] = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    return page


def l1(server: LMCacheServer) -> L1:
    """What the server's status page says of its pool."""
    pool = _find(status(server))
    assert pool is not None
    return L1(
        pool["total_object_count"],
        pool["write_locked_count"],
        pool["read_locked_count"],
        pool["memory_used_bytes"],
    )


def expect_exact(reader: Peer, content: int = 1) -> None:
    """A content that was stored is retrieved into a wiped cache, every byte of it."""
    reader.write(0, [])
    assert reader.retrieve(content, INTO, chunks=CHUNKS) is True
    assert reader.difference(content, INTO) == ""


def _find(page: Any) -> dict[str, Any] | None:
    if isinstance(page, dict):
        if "write_locked_count" in page:
            return page
        for value in page.values():
            if (found := _find(value)) is not None:
                return found
    return None
