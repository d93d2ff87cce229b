# SPDX-License-Identifier: Apache-2.0
"""One line in the log when a worker has registered its KV cache, with what was really agreed.

What: after LMCache's ``EngineDrivenTransferContext.register`` the context is looked at; the
function that makes its transport is noted the offer that it was made from.
Why: LMCache logs ``mode=SHM`` when the server offers shared memory, also where the worker could
not map it and pickles instead; and no layout, geometry or store path at all.
Versions: 0.5.4, 0.5.5, 0.5.6.
Obsolete: once LMCache logs the transport that it uses.
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import wrapt

from lmcache_rbln._log import logger_of
from lmcache_rbln.lmcache_compat.shared_memory import SHARED_MEMORY_FLAGS

_logger = logger_of("registration")

_MODULE = "lmcache.v1.multiprocess.transfer_context.worker_transfer"


def install_when_needed() -> None:
    """Install the hooks as soon as LMCache imports its transfer contexts."""
    wrapt.register_post_import_hook(_install, _MODULE)


def _install(module: ModuleType) -> None:
    try:
        for name in ("create_engine_driven_context", "EngineDrivenTransferContext.register"):
            wrapt.resolve_path(module, name)
    except AttributeError as exc:
        _logger().debug("no line at registration: %s has changed (%s)", _MODULE, exc)
        return
    wrapt.wrap_function_wrapper(module, "create_engine_driven_context", _note_offer)
    wrapt.wrap_function_wrapper(module, "EngineDrivenTransferContext.register", _register)


def _note_offer(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del instance
    transport = wrapped(*args, **kwargs)
    given = inspect.signature(wrapped).bind(*args, **kwargs).arguments
    transport.lmcache_rbln_offer = given.get("shm_name") or ""
    return transport


def _register(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = wrapped(*args, **kwargs)
    try:
        given = inspect.signature(wrapped).bind(*args, **kwargs).arguments
        _report(instance, list(given["kv_caches"].values()), int(given["blocks_in_chunk"]))
    except Exception as exc:
        # The registration stands; only its line is lost.
        _logger().debug("no line at registration: %r", exc)
    return result


def _report(context: Any, layers: list[Any], blocks_in_chunk: int) -> None:
    from lmcache.v1.multiprocess.transfer_context import (
        AsyncEngineDrivenTransferContext,
        EngineDrivenContextShm,
    )

    from lmcache_rbln import kv_layout

    transport = context.engine_driven_context
    if layers[0].device.type != "rbln" or transport is None:
        return
    paged = kv_layout.resolve(layers)
    shared = isinstance(transport, EngineDrivenContextShm)
    asynchronous = isinstance(context, AsyncEngineDrivenTransferContext)
    offer = getattr(transport, "lmcache_rbln_offer", "")
    _logger().info(
        "KV cache registered: %d layers, %s, %d blocks of %d tokens, %d heads of %d, %s on %s; "
        "%d bytes a block, %d blocks a chunk; transport %s, stores %s",
        len(paged.layers),
        paged.layout.value,
        paged.num_blocks,
        paged.block_size,
        paged.num_heads,
        paged.head_size,
        str(paged.dtype).removeprefix("torch."),
        paged.device,
        paged.block_nbytes * len(paged.layers),
        blocks_in_chunk,
        "shared memory" if shared else "pickle",
        "asynchronous" if asynchronous else "synchronous",
    )
    if shared:
        return
    if offer:
        _logger().warning(
            "The LMCache server offers the shared memory %s, but this worker cannot map it and "
            "pickles, which LMCache's server does not expect: nothing will be found again. Run "
            "server and worker with the same /dev/shm (containers: --ipc=host, or "
            "--ipc=container:NAME). LMCACHE_RBLN_GUARD=0 keeps this from being refused.",
            offer,
        )
    else:
        _logger().warning(
            "The LMCache server offers no shared memory, and chunks are pickled, 10 to 50 times "
            "slower: start it with %s on this host, and with /dev/shm larger than --l1-size-gb.",
            SHARED_MEMORY_FLAGS,
        )
