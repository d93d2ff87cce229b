# SPDX-License-Identifier: Apache-2.0
"""What tests do in a worker process, to its runner."""

from __future__ import annotations

import threading
from typing import Any


def forced_clear(runner: Any) -> None:
    """Drop everything the server holds, locked or not."""
    runner.adapter().req_client.clear(force=True).result(timeout=10)


def is_registered(runner: Any) -> bool:
    return runner.adapter().transfer_ctx is not None


def registration(runner: Any) -> int:
    """Tells one registration from another one."""
    return id(runner.adapter().transfer_ctx)


def register_again(runner: Any) -> None:
    runner.connector.register_kv_caches(dict(runner.cache.layers))


def threads(runner: Any) -> int:
    return len(threading.enumerate())


def register_meta(runner: Any) -> None:
    caches = {name: layer.to("meta") for name, layer in runner.cache.layers.items()}
    runner.connector.register_kv_caches(caches)


def register_strange(runner: Any) -> None:
    caches = {name: layer.flatten(1) for name, layer in runner.cache.layers.items()}
    runner.connector.register_kv_caches(caches)


def retrieves(runner: Any) -> list[int]:
    """How many loads each child has sent out."""
    return [child.retrieves_noted for child in runner.children()]


def note_retrieves(runner: Any) -> None:
    for child in runner.children():
        child.retrieves_noted = 0

        def noted(*args: Any, child: Any = child, submit: Any, **kwargs: Any) -> Any:
            child.retrieves_noted += 1
            return submit(*args, **kwargs)

        adapter = child.worker_adapter
        submit = adapter.submit_retrieve_request
        adapter.submit_retrieve_request = lambda *a, noted=noted, submit=submit, **k: noted(
            *a, submit=submit, **k
        )
