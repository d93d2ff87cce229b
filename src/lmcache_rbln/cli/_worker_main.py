# SPDX-License-Identifier: Apache-2.0
"""The worker process of the demo: paged KV caches on one NPU, and a client of the server.

It reads one JSON object a line from its standard input, does what it says, and writes one JSON
object to the descriptor that its only argument names. It ends when its input does.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from lmcache_rbln.cli._known_kv import Geometry, KnownCache
from lmcache_rbln.lmcache_compat.worker import StoreMode, WorkerClient


class Worker:
    """What a worker can be told to do; each public method is a command, its arguments the line's.

    Blocks with content are given as ``placed``: pairs of a block id and its first token.
    """

    def __init__(self) -> None:
        self._client: WorkerClient | None = None
        self._cache: KnownCache | None = None

    @property
    def client(self) -> WorkerClient:
        if self._client is None:
            raise RuntimeError("the worker is not connected")
        return self._client

    @property
    def cache(self) -> KnownCache:
        if self._cache is None:
            raise RuntimeError("the worker has no KV cache")
        return self._cache

    def prepare(self) -> dict[str, Any]:
        """Load torch and LMCache, which takes seconds."""
        import lmcache
        import torch

        from lmcache_rbln.lmcache_compat import selected

        return {
            "lmcache": lmcache.__version__,
            "torch": torch.__version__,
            "backend": selected.name(),
        }

    def connect(
        self,
        url: str,
        model_name: str,
        world_size: int = 1,
        worker_id: int = 0,
        kv_readers: int = 1,
        timeout: float = 60.0,
    ) -> dict[str, Any]:
        """Connect to a server, leaving the one before."""
        self.disconnect()
        self._client = WorkerClient(
            url,
            model_name=model_name,
            world_size=world_size,
            worker_id=worker_id,
            kv_readers=kv_readers,
            timeout=timeout,
        )
        return {"chunk_size": self._client.chunk_size}

    def register(
        self, geometry: dict[str, Any], device: str = "rbln:0", store_mode: str = "auto"
    ) -> dict[str, Any]:
        """Allocate a wiped KV cache and register it."""
        self._cache = KnownCache(Geometry(**geometry), device)
        transport = self.client.register(
            self._cache.layers,
            block_size=self._cache.geometry.block_size,
            store_mode=StoreMode(store_mode),
        )
        return {"transport": transport.value, "is_async": self.client.is_async}

    def nbytes(self, tokens: int) -> int:
        """Bytes of the KV of so many tokens in this cache."""
        return self.cache.nbytes(tokens)

    def write(self, seed: int, placed: list[tuple[int, int]]) -> None:
        """Wipe the cache and put known content into some blocks."""
        self.cache.write(seed, placed)

    def difference(self, seed: int, placed: list[tuple[int, int]]) -> str:
        """Compare the whole cache; "" if every byte is as it must be."""
        return self.cache.difference(seed, placed)

    def lookup(self, token_ids: list[int], request_id: str) -> int:
        """Tokens that the server holds."""
        return self.client.lookup(token_ids, request_id=request_id)

    def free_lookup(self, **arguments: Any) -> None:
        """Give a lookup up."""
        self.client.free_lookup(**arguments)

    def store(self, **arguments: Any) -> dict[str, Any]:
        """Store blocks; says whether it worked, and how many seconds it took."""
        return self._timed(lambda: self.client.store(**arguments))

    def retrieve(self, **arguments: Any) -> dict[str, Any]:
        """Retrieve into blocks; says whether it worked, and how many seconds it took."""
        return self._timed(lambda: self.client.retrieve(**arguments))

    def end_session(self, request_id: str) -> None:
        """The request is over."""
        self.client.end_session(request_id)

    def disconnect(self) -> None:
        """Unregister and leave the server."""
        if self._client is not None:
            self._client.close()
            self._client = None
        self._cache = None

    @staticmethod
    def _timed(operation: Callable[[], bool]) -> dict[str, Any]:
        start = time.perf_counter()
        done = operation()
        return {"done": done, "seconds": time.perf_counter() - start}


def main() -> None:
    """Serve commands until the input ends."""
    # A descriptor of its own, and standard output turned into standard error: a library that
    # prints cannot break the protocol.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    worker = Worker()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            reply = {"result": getattr(worker, command.pop("command"))(**command)}
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies, flush=True)
    worker.disconnect()


if __name__ == "__main__":
    main()
