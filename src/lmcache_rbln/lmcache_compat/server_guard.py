# SPDX-License-Identifier: Apache-2.0
"""In the server: no chunk is published that was never written.

What: three methods of LMCache's engine-driven transfer and, on 0.5.4 and 0.5.5, its write lock.
Why: a worker reserves shared memory, gathers into it and commits. If it goes away in between, or
its gather fails, the released server publishes the reservation as it is, when the worker
unregisters or is reaped; 0.5.4 and 0.5.5 also when the write lock expires. Another worker then
gets zeros. With the guard an unfinished write is discarded, the worker can give a reservation up,
and a commit ends only the reservation that it belongs to: LMCache's own key is the token range,
so a store that was overtaken by another of the same range would publish the other's.
Versions: 0.5.4, 0.5.5, 0.5.6.
Obsolete: once LMCache discards the pending writes of a released worker, and has a request that
gives a reservation up.

Changes nothing for workers that move KV in another way.
"""

from __future__ import annotations

import time
from types import ModuleType
from typing import Any

import wrapt

from lmcache_rbln import __version__
from lmcache_rbln._log import logger_of
from lmcache_rbln.lmcache_compat import guard_protocol
from lmcache_rbln.lmcache_compat.relied_on import ChangedError, require, require_exactly

_TRANSFER_MODULE = "lmcache.v1.multiprocess.modules.engine_driven_transfer"
_L1_MODULE = "lmcache.v1.distributed.l1_manager"

#: The methods that the guard replaces, with all their parameters: checked before anything is touched.
_RELIED_ON: dict[str, tuple[str, ...]] = {
    "EngineDrivenTransferModule._release_entry": ("instance_id", "entry"),
    "EngineDrivenTransferModule.report_status": (),
}
_RELIED_ON_STRATEGY = {
    "prepare_store": ("key", "instance_id", "context", "resolve_obj_keys"),
    "commit_store": ("key", "instance_id", "cpu_data", "context", "resolve_obj_keys"),
}
#: Some of the strategy's constructor's: what they are kept as is used.
_RELIED_ON_STATE = ("storage_manager", "pending_writes", "pending_lock", "transfer_key_factory")


_logger = logger_of("server_guard")


def install_when_needed() -> None:
    """Install the guard as soon as the server's modules are imported; workers never import them."""
    if guard_protocol.is_enabled():
        wrapt.register_post_import_hook(_install_locks, _L1_MODULE)
        wrapt.register_post_import_hook(_install, _TRANSFER_MODULE)


class _Reservation(list[Any]):
    """LMCache's list of the object keys of a pending write, with what tells it from another.

    Attributes:
        number: Sent to the worker, which ends the reservation by it.
        expires_at: ``time.monotonic()`` after which LMCache may give the memory to another writer;
            from then on the reservation is not ours to finish or to discard.
    """

    def __init__(self, keys: list[Any], lifetime: float) -> None:
        super().__init__(keys)
        self.number = guard_protocol.new_reservation()
        self.expires_at = time.monotonic() + lifetime

    @property
    def has_expired(self) -> bool:
        return time.monotonic() >= self.expires_at


def _install(module: ModuleType) -> None:
    from lmcache.v1.distributed.l1_manager import L1Manager
    from lmcache.v1.multiprocess.modules import server_transfer

    try:
        strategy = server_transfer.ShmTransferStrategy
        for name, parameters in _RELIED_ON.items():
            kind, _, method = name.partition(".")
            require_exactly(getattr(module, kind), method, *parameters)
        for method, parameters in _RELIED_ON_STRATEGY.items():
            require_exactly(strategy, method, *parameters)
        require(strategy, "__init__", *_RELIED_ON_STATE)
        if not _discards_in_one_step(L1Manager):
            # Decorated: their parameters can't be seen.
            require(L1Manager, "delete")
            require(L1Manager, "get_object_state")
            if not _locks_installed:
                raise ChangedError("the write lock of L1Manager")
    except (ChangedError, AttributeError, TypeError, ValueError) as exc:
        _logger().warning(
            "lmcache-rbln cannot guard this LMCache server (what it relies on has changed: %s): "
            "when a worker's store fails or the worker dies, chunks that were never written may be "
            "served as zeros. This release of LMCache is not supported.",
            exc,
        )
        return
    _guard_strategy(strategy)
    _guard_module(module.EngineDrivenTransferModule)
    _logger().info("lmcache-rbln %s guards this server against unfinished writes", __version__)


def _discards_in_one_step(l1_manager: Any) -> bool:
    return hasattr(l1_manager, "finish_write_and_delete")


# -- the pending writes of shared memory -----------------------------------------------------


def _guard_strategy(strategy: Any) -> None:
    prepare, commit = strategy.prepare_store, strategy.commit_store

    def prepare_store(
        self: Any, key: Any, instance_id: int, context: Any, resolve_obj_keys: Any
    ) -> Any:
        at = self._transfer_key_factory(key, instance_id)
        with self._pending_lock:
            pending = self._pending_writes.get(at)
            expired = isinstance(pending, _Reservation) and pending.has_expired
            if expired:
                del self._pending_writes[at]
        if expired:
            _discard(self._storage_manager, pending)
        elif pending is not None:
            # The same worker writes the same range already. LMCache would overwrite its record
            # of that write if a chunk had been evicted meanwhile; the answer is LMCache's for a
            # range with nothing left to write.
            from lmcache.v1.multiprocess.modules.server_transfer import PrepareStoreResponse

            return PrepareStoreResponse(context={"slots": [], "chunk_indices": []})
        response = prepare(self, key, instance_id, context, resolve_obj_keys)
        slots = response.context.get("slots")
        if slots:
            with self._pending_lock:
                keys = self._pending_writes.get(at)
                if keys is not None:
                    reservation = _Reservation(keys, _write_lifetime(self._storage_manager))
                    self._pending_writes[at] = reservation
                    for slot in slots:
                        slot[guard_protocol.SLOT_FIELD] = reservation.number
        return response

    def commit_store(
        self: Any,
        key: Any,
        instance_id: int,
        cpu_data: bytes,
        context: Any,
        resolve_obj_keys: Any,
    ) -> bool:
        at = self._transfer_key_factory(key, instance_id)
        said = guard_protocol.decode(cpu_data)
        if said is None and cpu_data != b"":
            # A worker that could not map the segment sends the chunks themselves. What was reserved
            # for it must go first: LMCache would find the chunks reserved, write nothing, report
            # success, and publish the reservation in the end.
            with self._pending_lock:
                unused = self._pending_writes.pop(at, None)
            if unused:
                _discard(self._storage_manager, unused)
            return bool(commit(self, key, instance_id, cpu_data, context, resolve_obj_keys))
        with self._pending_lock:
            pending = self._pending_writes.get(at)
            if not isinstance(pending, _Reservation) or (said and said[0] != pending.number):
                return False
            del self._pending_writes[at]
        written = said is None or said[1] == guard_protocol.WRITTEN
        if written and not pending.has_expired:
            self._storage_manager.finish_write(list(pending))
            return True
        _discard(self._storage_manager, pending)
        return False

    strategy.prepare_store, strategy.commit_store = prepare_store, commit_store


def _guard_module(module: Any) -> None:
    release, report = module._release_entry, module.report_status

    def _release_entry(self: Any, instance_id: int, entry: Any) -> None:
        with self._pending_shm_lock:
            left = [at for at in self._pending_shm_writes if at[0] == instance_id]
            unfinished = [self._pending_shm_writes.pop(at) for at in left]
        for pending in unfinished:
            _discard(self._ctx.storage_manager, pending)
        if unfinished:
            _logger().warning(
                "Worker instance %d left with %d chunks reserved that it never finished: discarded",
                instance_id,
                sum(map(len, unfinished)),
            )
        # What LMCache finds now has no pending write any more; the rest is its own.
        release(self, instance_id, entry)

    def report_status(self: Any) -> dict[str, Any]:
        return {**report(self), guard_protocol.STATUS_FIELD: __version__}

    module._release_entry, module.report_status = _release_entry, report_status


# -- LMCache's store of objects --------------------------------------------------------------


def _write_lifetime(storage_manager: Any) -> float:
    """Seconds for which LMCache keeps a reservation (``--l1-write-ttl-seconds``)."""
    return min(float(l1._write_ttl_seconds) for l1 in _l1_managers(storage_manager))


def _l1_managers(storage_manager: Any) -> list[Any]:
    several = getattr(storage_manager, "_l1_managers_by_id", None)  # 0.5.6
    return [storage_manager._l1_manager] if several is None else list(several.values())


def _discard(storage_manager: Any, pending: list[Any]) -> None:
    """Free the memory of a pending write; its keys were never seen by a reader.

    An expired one may have another owner by now, and is left alone where it has.
    """
    expired = isinstance(pending, _Reservation) and pending.has_expired
    for l1 in _l1_managers(storage_manager):
        if _discards_in_one_step(l1):
            from lmcache.v1.distributed.storage_manager import _L1_WRITE_TAG

            if not expired:
                l1.finish_write_and_delete(list(pending), tag=_L1_WRITE_TAG)
            continue
        unwritten = []
        for key in pending:
            state = l1.get_object_state(key)
            if state is None or state.write_lock.released:
                continue
            if not expired:
                state.write_lock.reset()  # Unlocked, but no reader gets it.
            unwritten.append(key)
        l1.delete(unwritten)  # Refuses what is locked.


_locks_installed = False


def _install_locks(module: ModuleType) -> None:
    """0.5.4 and 0.5.5: an object whose write lock went away without a finish is not readable.

    0.5.6 keeps unfinished writes out of readers' sight by itself.
    """
    global _locks_installed
    if _discards_in_one_step(module.L1Manager):
        return
    try:
        lock, state = module.TTLLock, module.L1ObjectState
        readable = state.available_for_read
    except AttributeError as exc:
        _logger().debug("the write lock of L1Manager has changed: %s", exc)
        return  # _install, which finds the locks missing, says so.

    def available_for_read(self: Any) -> bool:
        return bool(readable(self)) and self.write_lock.released

    vars(module)["TTLLock"] = _remembering(lock)
    state.available_for_read = available_for_read
    _locks_installed = True


def _remembering(original: Any) -> Any:
    class Lock(original):  # type: ignore[misc]
        """LMCache's lock, which knows whether it was last released or merely ran out."""

        def __init__(self, ttl_second: int) -> None:
            super().__init__(ttl_second)
            self.released = True

        def lock(self) -> None:
            self.released = False
            super().lock()

        def unlock(self) -> None:
            super().unlock()
            self.released = True

    return Lock
