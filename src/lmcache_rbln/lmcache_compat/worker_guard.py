# SPDX-License-Identifier: Apache-2.0
"""In a worker: every reservation and read lock is given back, whatever the transfer raised.

What: the two-phase calls of LMCache's shared-memory context, the two ``submit`` methods of its
engine-driven contexts, and the class of the future that the asynchronous one resolves.
Why: between "prepare" and "commit" the released contexts let go of nothing. A gather that raises
leaves its reservation (see ``server_guard``), and the next store of the same tokens reports
success with nothing stored; a device synchronize that fails after a scatter, or an unmapped slot,
leaves read locks and stops the engine. A segment that was cut short, or a full ``/dev/shm``, ends
the worker with SIGBUS at the first touch. And a worker that cannot map the segment falls back to
pickle, which the server does not notice: every chunk is lost.
With the guard a failed store gives its reservation up before its result is seen; a failed retrieve
releases its locks and is reported as failed; a slot is checked and faulted in before it is used; a
segment that cannot be mapped refuses the registration.
Where the server has no guard, a reservation cannot be given up: the worker warns once, and reports
stores of the chunks concerned as failed.
Versions: 0.5.4, 0.5.5, 0.5.6.
Obsolete: once LMCache's contexts release in a ``finally`` and its protocol can give up a store.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import inspect
import os
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt

from lmcache_rbln._log import logger_of
from lmcache_rbln.host_memory import MADV_POPULATE_WRITE
from lmcache_rbln.lmcache_compat import guard_protocol, requests
from lmcache_rbln.lmcache_compat.relied_on import (
    ChangedError,
    has_module,
    require,
    require_exactly,
)

_CONTEXTS = "lmcache.v1.multiprocess.transfer_context"

#: Seconds to wait for the server to confirm that a reservation was given up. Its requests from
#: one worker are served in order, so a retry after that time is still right, only not confirmed.
_GIVE_UP_TIMEOUT = 5.0


_logger = logger_of("worker_guard")


def install_when_needed() -> None:
    """Install each part of the guard as soon as LMCache imports the module that it concerns."""
    if not guard_protocol.is_enabled():
        return
    for name, install in (
        ("shm", _install_shared_memory),
        ("worker_transfer", _install_submit),
        ("async_engine_driven", _install_future),
    ):
        module = f"{_CONTEXTS}.{name}"
        if has_module(module):
            wrapt.register_post_import_hook(_checked(install), module)
        else:
            _step_aside(module, "there is no such module")


def _checked(install: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def run(module: ModuleType) -> None:
        try:
            install(module)
        except (ChangedError, AttributeError, TypeError, ValueError) as exc:
            _step_aside(module.__name__, exc)

    return run


def _step_aside(module: str, change: object) -> None:
    _logger().warning(
        "lmcache-rbln cannot guard LMCache's transfers (%s has changed: %s): a failed store or "
        "retrieve may leave chunks and locks behind on the server. This release of LMCache is not "
        "supported.",
        module,
        change,
    )


# -- what a thread has prepared and not yet committed ----------------------------------------


class _Store:
    """A store between prepare and commit.

    Attributes:
        reservation: The server's number of it; None before the answer, or if it has no guard.
        reserved: Whether slots were handed out.
        lost: Chunks of the range that an earlier store left reserved for good.
    """

    def __init__(self, context: Any, key: Any, instance_id: int) -> None:
        self.context, self.key, self.instance_id = context, key, instance_id
        self.reservation: str | None = None
        self.reserved = False
        self.lost = False


class _Open(threading.local):
    """The store and the retrieve that this thread has begun; a thread has one of each at most."""

    store: _Store | None = None
    retrieve: tuple[Any, Any, int] | None = None


_open = _Open()
_warned = False


def _warn_of_unguarded_server() -> None:
    global _warned
    if not _warned:
        _warned = True
        _logger().warning(
            "The LMCache server is not guarded against unfinished writes: when a store fails or a "
            "worker dies, it may serve chunks that were never written, as zeros. Install "
            "lmcache-rbln beside the server too."
        )


# -- shared memory ---------------------------------------------------------------------------


def _install_shared_memory(module: ModuleType) -> None:
    context = module.EngineDrivenContextShm
    prepare_store = require_exactly(context, "prepare_store", "key", "instance_id")
    commit_store = require_exactly(context, "commit_store", "key", "instance_id", "_chunks")
    prepare_retrieve = require(context, "prepare_retrieve", "key", "instance_id")
    commit_retrieve = require_exactly(context, "commit_retrieve", "key", "instance_id")
    build = require_exactly(context, "_build_slot_tensors", "slots")
    require(context, "__init__", "shm_name", "pool_size")
    _require_token_ids()

    def guarded_prepare_store(self: Any, key: Any, instance_id: int) -> Any:
        give_up_store()  # Of a store whose end was not seen.
        store = _open.store = _Store(self, key, instance_id)
        prepared = prepare_store(self, key, instance_id)
        chunks = _unfinished(self)
        missing = chunks and _chunks_of(self, key).difference(
            _chunks_of(self, key, prepared[1] if prepared else [])
        )
        store.lost = bool(missing) and not chunks.isdisjoint(missing)
        if not store.reserved:
            _open.store = None
            if store.lost:
                raise RuntimeError(
                    "an earlier store of these tokens failed, and the server, which has no "
                    "lmcache-rbln beside it, keeps them reserved: nothing was stored"
                )
        return prepared

    def guarded_commit_store(self: Any, key: Any, instance_id: int, _chunks: Any) -> bool:
        store = _open.store
        if store is None or store.reservation is None:
            done = bool(commit_store(self, key, instance_id, _chunks))
        else:
            done = _end(store, guard_protocol.WRITTEN, self.mq_timeout)
        _open.store = None
        return done and not (store is not None and store.lost)

    # 0.5.7 says how many chunks it expects, too.
    def guarded_prepare_retrieve(self: Any, key: Any, instance_id: int, *more: Any) -> Any:
        release_retrieve()  # Of a retrieve whose end was not seen.
        _open.retrieve = (self, key, instance_id)
        return prepare_retrieve(self, key, instance_id, *more)

    def guarded_commit_retrieve(self: Any, key: Any, instance_id: int) -> bool:
        _open.retrieve = None
        return bool(commit_retrieve(self, key, instance_id))

    def guarded_build(self: Any, slots: list[dict[str, Any]]) -> Any:
        store = _open.store
        if store is not None and slots:
            store.reserved = True
            store.reservation = slots[0].get(guard_protocol.SLOT_FIELD)
            if store.reservation is None:
                _warn_of_unguarded_server()
        _memory(self).ensure([(int(slot["offset"]), int(slot["length"])) for slot in slots])
        return build(self, slots)

    context.prepare_store, context.commit_store = guarded_prepare_store, guarded_commit_store
    context.prepare_retrieve = guarded_prepare_retrieve
    context.commit_retrieve = guarded_commit_retrieve
    context._build_slot_tensors = guarded_build


def _require_token_ids() -> None:
    """By which chunks are told apart, in ``_chunks_of``; 0.5.7 has ``token_bytes`` instead."""
    from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey

    fields = [field.name for field in dataclasses.fields(IPCCacheServerKey)]
    if "token_ids" not in fields:
        raise ChangedError(f"IPCCacheServerKey({', '.join(fields)})")


def give_up_store() -> None:
    """Give back what this thread's store has reserved, if it was prepared and not committed."""
    store, _open.store = _open.store, None
    if store is None or not store.reserved:
        return
    # Whatever happens here, the store itself has to come to its end.
    try:
        if store.reservation is None:
            _unfinished(store.context).update(_chunks_of(store.context, store.key))
        else:
            _end(store, guard_protocol.GIVE_UP, min(_GIVE_UP_TIMEOUT, store.context.mq_timeout))
    except Exception:
        _logger().warning(
            "A failed store could not be given up: its chunks stay reserved on the server "
            "until this worker unregisters",
            exc_info=True,
        )


def release_retrieve() -> None:
    """Release this thread's read locks, if its retrieve was prepared and not committed."""
    retrieve, _open.retrieve = _open.retrieve, None
    if retrieve is not None:
        context, key, instance_id = retrieve
        try:
            context.commit_retrieve(key, instance_id)
        except Exception:
            _logger().warning(
                "The read locks of a failed retrieve could not be released: its chunks stay "
                "locked until the server lets the locks expire",
                exc_info=True,
            )


def _end(store: _Store, ending: str, timeout: float) -> bool:
    """End a reservation by its number; whether the server published it."""
    assert store.reservation is not None
    payload = guard_protocol.encode(store.reservation, ending)
    future = requests.ask(store.context, "commit_store", store.key, store.instance_id, payload)
    try:
        return bool(future.result(timeout=timeout))
    except TimeoutError:
        return False


def _unfinished(context: Any) -> set[int]:
    """Chunks that this worker left reserved on a server without a guard."""
    found: set[int] = context.__dict__.setdefault("_lmcache_rbln_unfinished", set())
    return found


def _chunks_of(context: Any, key: Any, indices: list[int] | None = None) -> set[int]:
    """The chunks of a key's range, or those at ``indices`` in it, as hashes of their prefixes."""
    size = int(context.layout_desc.shapes[0][-2])  # [.., tokens a chunk, width]
    whole = range(key.start + size, key.end + 1, size)
    ends = whole if indices is None else [whole[index] for index in indices]
    owner = (key.model_name, key.world_size, key.worker_id, key.cache_salt)
    return {hash((owner, key.token_ids[:end])) for end in ends}


# -- slots that are there to be touched --------------------------------------------------------

#: Bytes that are faulted in and remembered together; a multiple of every page size.
_PIECE = 2 << 20


def _memory(context: Any) -> _SlotMemory:
    memory: _SlotMemory | None = context.__dict__.get("_lmcache_rbln_memory")
    if memory is None or memory.segment is not context._shm:
        memory = context._lmcache_rbln_memory = _SlotMemory(context._shm, context._pool_size)
    return memory


class _SlotMemory:
    """The pool's pages as this process has them.

    Args:
        segment: ``multiprocessing.shared_memory.SharedMemory``; None once it was closed.
        size: Bytes of the pool.
    """

    def __init__(self, segment: Any, size: int) -> None:
        self.segment = segment
        self._size = size
        self._there = bytearray(-(-size // _PIECE))
        self._lock = threading.Lock()
        self._libc = ctypes.CDLL(None, use_errno=True)

    def ensure(self, slots: list[tuple[int, int]]) -> None:
        """Make sure that no byte of the slots, given as (offset, length), raises SIGBUS.

        The segment may still be cut short a moment later; nothing but LMCache's server and an
        administrator can do that, and neither does in normal operation.

        Raises:
            RuntimeError: The segment is closed, is shorter than the pool, or has no memory left.
        """
        if self.segment is None:
            raise RuntimeError("the server's shared memory is closed in this worker")
        there = os.fstat(self.segment._fd).st_size
        for offset, length in slots:
            if min(offset, length) < 0 or offset + length > self._size:
                raise RuntimeError(
                    f"the server names bytes {offset} to {offset + length} of a shared-memory pool "
                    f"of {self._size} bytes"
                )
            if offset + length > there:
                raise RuntimeError(
                    f"the server's shared memory {self.segment.name} was cut short to {there} "
                    f"bytes, expected {self._size}; restart the LMCache server"
                )
            with self._lock:
                for piece in range(offset // _PIECE, -(-(offset + length) // _PIECE)):
                    if not self._there[piece]:
                        self._populate(piece * _PIECE, min((piece + 1) * _PIECE, there, self._size))
                        self._there[piece] = 1

    def _populate(self, start: int, end: int) -> None:
        first = ctypes.c_char.from_buffer(self.segment.buf)
        address = ctypes.addressof(first)
        del first  # It would keep the segment from being closed.
        done = self._libc.madvise(
            ctypes.c_void_p(address + start), ctypes.c_size_t(end - start), MADV_POPULATE_WRITE
        )
        code = ctypes.get_errno() if done else 0
        if code == errno.EINVAL:  # An older kernel, which can at least allocate the pages.
            try:
                os.posix_fallocate(self.segment._fd, start, end - start)
            except OSError as exc:
                code = exc.errno or -1
            else:
                code = 0
        if code:
            raise RuntimeError(
                f"bytes {start} to {end} of the server's shared memory {self.segment.name} cannot "
                f"be used ({os.strerror(code)}): /dev/shm is full or the segment is gone; give "
                "/dev/shm room for the server's whole pool (--l1-size-gb)"
            )


# -- the contexts that engines call ------------------------------------------------------------


def _install_submit(module: ModuleType) -> None:
    context = module.EngineDrivenTransferContext
    create = require(module, "create_engine_driven_context", "shm_name", "pool_size")
    vars(module)["create_engine_driven_context"] = _refusing(create)
    store = require(context, "submit_store", "key")
    retrieve = require(context, "submit_retrieve", "key")

    # Only the synchronous context's; the asynchronous one has a submit_store of its own.
    def submit_store(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _reported(self, "store", store, give_up_store, args, kwargs)

    def submit_retrieve(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _reported(self, "retrieve", retrieve, release_retrieve, args, kwargs)

    context.submit_store, context.submit_retrieve = submit_store, submit_retrieve


def _refusing(create: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(create)

    def create_engine_driven_context(*args: Any, **kwargs: Any) -> Any:
        """No falling back to pickle where the server goes on with shared memory.

        LMCache's server is not told of it: it reserves shared memory for each store and offers
        slots for each retrieve. So no retrieve ever works, stores report success with nothing
        stored, and their reservations are published as zeros in the end.
        """
        import lmcache

        created = create(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        offered = given["shm_name"] if given["pool_size"] > 0 else ""
        if offered and not hasattr(created, "_shm") and lmcache.torch_device_type == "rbln":
            created.close()
            raise RuntimeError(
                f"the LMCache server shares its memory as {offered}, which this worker cannot map "
                "(LMCache's warning before this one says why), and LMCache's fallback loses every "
                "chunk: run server and worker with the same /dev/shm (containers: --ipc=host, or "
                "--ipc=container:NAME) and as the same user, or start the server without --shm-name"
            )
        return created

    return create_engine_driven_context


def _reported(
    context: Any,
    what: str,
    submit: Callable[..., Any],
    release: Callable[[], None],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """A failure of the transfer as a future that says so: the engine then does without it."""
    if context._engine_driven_context is None:
        return submit(context, *args, **kwargs)  # Says that nothing is registered.
    try:
        return submit(context, *args, **kwargs)
    except Exception:
        _logger().exception("A KV %s failed", what)
        from lmcache.v1.multiprocess.futures import MessagingFuture

        failed: Any = MessagingFuture()
        failed.set_result(False)
        return failed
    finally:
        release()


def _install_future(module: ModuleType) -> None:
    original: Any = module.MessagingFuture
    require(original, "set_result", "result")
    vars(module)["MessagingFuture"] = _settling(original)


def _settling(original: Any) -> Any:

    class SettlingFuture(original):  # type: ignore[misc]
        """Resolved by the thread of the store: what it still holds is given back before."""

        def set_result(self, result: Any) -> None:
            give_up_store()
            super().set_result(result)

    return SettlingFuture
