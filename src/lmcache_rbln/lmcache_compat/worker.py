# SPDX-License-Identifier: Apache-2.0
"""A worker's side of an LMCache server, the same for LMCache 0.5.4, 0.5.5 and 0.5.6.

The client does what an engine's connector does: it registers paged KV caches, looks prefixes
up, stores and retrieves blocks. The bytes move through LMCache's own transfer contexts, so the
device operations under test are called exactly as in an engine. It serves the demo, the
benchmark and the tests; engines keep using LMCache's connector.

Import this module only where ``import torch`` works: it loads LMCache and torch on first use.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import importlib.util
import inspect
import time
import uuid
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from lmcache_rbln.lmcache_compat import requests

if TYPE_CHECKING:
    import torch

__all__ = ["PendingStore", "ServerUnreachable", "StoreMode", "Transport", "WorkerClient"]


class ServerUnreachable(ConnectionError):  # noqa: N818
    """The LMCache server did not answer within the client's time-out."""


class Transport(str, enum.Enum):
    """How chunks travel between worker and server; agreed at registration."""

    SHARED_MEMORY = "shared memory"
    PICKLE = "pickle"


class StoreMode(str, enum.Enum):
    """Which of LMCache's two engine-driven transfer contexts carries the stores."""

    #: LMCache decides: asynchronous where the device has streams, events and pinned memory.
    AUTO = "auto"
    #: The store runs in the calling thread.
    SYNC = "sync"
    #: The store runs on LMCache's pool of threads, on a stream of its own.
    ASYNC = "async"


class PendingStore:
    """A store that has been submitted.

    It keeps the event that orders the store after the writes to the blocks: LMCache needs it
    alive until the store is over.
    """

    def __init__(self, future: Any, event: Any, timeout: float) -> None:
        self._future = future
        self._event = event
        self._timeout = timeout

    def done(self) -> bool:
        """Whether the store is over, whatever its outcome."""
        return bool(self._future.query())

    def result(self, timeout: float | None = None) -> bool:
        """Wait for the store, at most ``timeout`` seconds (default: the client's).

        Returns:
            True if every chunk is on the server, False if LMCache gave the store up.

        Raises:
            ServerUnreachable: the store was not over in time.
        """
        seconds = self._timeout if timeout is None else timeout
        if not self._future.wait(seconds):
            raise ServerUnreachable(f"the store was not over after {seconds:g} s")
        return bool(self._future.result())


class _Lmcache054:
    """How LMCache 0.5.4 talks to its server, and the base of the later ways.

    Requests are members of an enumeration sent through a message-queue client, and transfer
    contexts are given the client, a function that sends, and the instance id at each call.
    Obsolete once 0.5.4 is no longer supported.
    """

    def __init__(self, url: str) -> None:
        from lmcache.v1.multiprocess.mq import MessageQueueClient

        self._zmq = _zmq_context()
        self.client = MessageQueueClient(url, self._zmq)

    def request(self, name: str, *payload: Any) -> Any:
        """Send the request ``name`` (lower case, as in ``lookup``); returns LMCache's future."""
        return requests.submit(self.client, name, *payload)

    def create_context(self, kv_caches: dict[str, Any], instance_id: int, mode: StoreMode) -> Any:
        """A transfer context of LMCache for these caches, not yet registered."""
        kind = _context_class(mode)
        return kind() if kind is not None else _create_transfer_context()(kv_caches)

    def register(
        self,
        context: Any,
        instance_id: int,
        kv_caches: dict[str, Any],
        model_name: str,
        world_size: int,
        blocks_in_chunk: int,
        timeout: float,
    ) -> None:
        context.register(
            instance_id,
            kv_caches,
            model_name,
            world_size,
            blocks_in_chunk,
            self.client,
            timeout,
            send_request=requests.send,
        )

    def recorded_event(self, context: Any, is_async: bool) -> Any:
        # 0.5.4's contexts make no events, its connector does. The connector asks for an
        # interprocess event, which only the LMCache-driven mode uses; a local one orders the
        # stream as well.
        if not is_async:
            return None
        from lmcache import torch_dev

        event = torch_dev.Event()
        event.record(torch_dev.current_stream())
        return event

    def transfer_arguments(self, instance_id: int) -> tuple[Any, ...]:
        """What stands between the key and the caches in a call of a transfer context."""
        return (instance_id,)

    def unregister(self, context: Any, instance_id: int) -> Any:
        return self.request(requests.UNREGISTER, instance_id)

    def close(self) -> None:
        self.client.close()
        self._zmq.term()


class _Lmcache055(_Lmcache054):
    """LMCache 0.5.5: typed request clients, one method a request, made by a factory.

    Transfer contexts get the client at registration, and make their own events.
    Obsolete once 0.5.5 is no longer supported.
    """

    def __init__(self, url: str) -> None:
        from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

        self._zmq = _zmq_context()
        self.client = RequestClientFactory.create(url, context=self._zmq)

    def request(self, name: str, *payload: Any) -> Any:
        return getattr(self.client, name)(*payload)

    def register(
        self,
        context: Any,
        instance_id: int,
        kv_caches: dict[str, Any],
        model_name: str,
        world_size: int,
        blocks_in_chunk: int,
        timeout: float,
    ) -> None:
        context.register(
            instance_id,
            kv_caches,
            model_name,
            world_size,
            blocks_in_chunk,
            self.client,
            timeout,
        )

    def recorded_event(self, context: Any, is_async: bool) -> Any:
        return context.create_recorded_event()


class _Lmcache056(_Lmcache055):
    """LMCache 0.5.6: a transfer context belongs to one worker and one client from the start.

    Later releases are taken to talk this way too, until one is seen that does not.
    """

    def create_context(self, kv_caches: dict[str, Any], instance_id: int, mode: StoreMode) -> Any:
        kind = _context_class(mode)
        if kind is not None:
            return kind(instance_id, self.client)
        return _create_transfer_context()(
            kv_caches, instance_id=instance_id, req_client=self.client
        )

    def register(
        self,
        context: Any,
        instance_id: int,
        kv_caches: dict[str, Any],
        model_name: str,
        world_size: int,
        blocks_in_chunk: int,
        timeout: float,
    ) -> None:
        context.register(kv_caches, model_name, world_size, blocks_in_chunk, timeout)

    def transfer_arguments(self, instance_id: int) -> tuple[Any, ...]:
        return ()

    def unregister(self, context: Any, instance_id: int) -> Any:
        return context.unregister()


def _zmq_context() -> Any:
    import zmq

    context = zmq.Context()
    # For the sockets that LMCache's clients make in it (all versions), which close without saying
    # how long to wait: a message that a dead server never took would hold the exit for good.
    context.linger = 0
    return context


def _create_transfer_context() -> Any:
    # LMCache's own choice (all versions): honours LMCACHE_MP_TRANSFER_MODE and refuses a mode
    # that the device's spec does not offer, as in an engine.
    from lmcache.v1.multiprocess.transfer_context import create_transfer_context

    return create_transfer_context


def _context_class(mode: StoreMode) -> Any:
    # The two engine-driven contexts by name (all versions): LMCache's factory takes the
    # asynchronous one whenever the device allows it, so the other is reached only like this.
    if mode is StoreMode.AUTO:
        return None
    from lmcache.v1.multiprocess.transfer_context import (
        AsyncEngineDrivenTransferContext,
        EngineDrivenTransferContext,
    )

    if mode is StoreMode.ASYNC:
        return AsyncEngineDrivenTransferContext
    return EngineDrivenTransferContext


def _connect(url: str) -> _Lmcache054:
    # Told apart by what is there, not by version number: a patched or later LMCache then works
    # as long as it talks like one of the three.
    if importlib.util.find_spec("lmcache.v1.multiprocess.transport") is None:
        return _Lmcache054(url)
    from lmcache.v1.multiprocess.transfer_context import EngineDrivenTransferContext

    bound = "req_client" in inspect.signature(EngineDrivenTransferContext.__init__).parameters
    return _Lmcache056(url) if bound else _Lmcache055(url)


class WorkerClient:
    """One worker of one engine, connected to an LMCache server.

    Tokens name the content: two workers that store and retrieve the same token ids under the
    same ``model_name`` and ``world_size`` share chunks. All token counts and positions are in
    tokens; ``start`` and ``end`` are multiples of the server's :attr:`chunk_size`.

    A ``request_id`` names one request of one model, and is not used again after
    :meth:`end_session`. A retrieve needs a lookup under the same ``request_id`` before it: the lookup takes the read
    locks that the retrieve gives back. A lookup whose chunks are not retrieved is given up with
    :meth:`free_lookup`.

    Args:
        url: the server's address, as ``tcp://127.0.0.1:5555``.
        model_name: part of every key.
        world_size: number of pieces that a chunk's KV is split into (tensor parallel size; 1
            for MLA, whose KV is the same on every rank).
        worker_id: which of these pieces is this worker's, from 0.
        kv_readers: how many workers retrieve the same piece (tensor parallel size for MLA,
            else 1): a lookup takes that many read locks.
        timeout: seconds to wait for any answer of the server.

    Raises:
        ServerUnreachable: no server answers at ``url``.
    """

    def __init__(
        self,
        url: str,
        *,
        model_name: str,
        world_size: int = 1,
        worker_id: int = 0,
        kv_readers: int = 1,
        timeout: float = 60.0,
    ) -> None:
        if not 0 <= worker_id < world_size:
            raise ValueError(
                f"worker_id={worker_id} with world_size={world_size}: "
                f"expected 0 <= worker_id < world_size"
            )
        if kv_readers < 1:
            raise ValueError(f"kv_readers={kv_readers}: expected at least 1")
        self.url = url
        self.model_name = model_name
        self.world_size = world_size
        self.worker_id = worker_id
        self.timeout = timeout
        # 63 bits at random, as LMCache's adapter does: process ids repeat across containers.
        self.instance_id = uuid.uuid4().int & ((1 << 63) - 1)
        self._kv_readers = kv_readers
        self._kv_caches: dict[str, Any] = {}
        self._context: Any = None
        self._block_size = 0
        self._closed = False
        self._lmcache = _connect(url)
        try:
            self.chunk_size: int = int(self._ask("get_chunk_size"))
        except BaseException:
            self._lmcache.close()
            raise

    # -- the connection ------------------------------------------------------------------

    def _ask(self, name: str, *payload: Any, timeout: float | None = None) -> Any:
        future = self._lmcache.request(name, *payload)
        seconds = self.timeout if timeout is None else timeout
        # LMCache's future counts a time-out in its own statistics when result() raises.
        if not future.wait(seconds):
            raise ServerUnreachable(
                f"the LMCache server at {self.url} did not answer {name!r} within {seconds:g} s; "
                f"check that `lmcache server` runs there and look into its log"
            )
        return future.result()

    def ping(self) -> None:
        """Ask the server for a sign of life, as this worker.

        From the first ping on, the server drops the worker's registration after
        ``--worker-reap-timeout-seconds`` of silence (120 s by default) instead of
        ``--worker-registration-grace-seconds`` (an hour).
        """
        self._ask("ping", self.instance_id)

    def serves_engine_driven(self) -> bool:
        """Whether the server has the engine-driven transfer mode; waits :attr:`timeout` for a no.

        Only before :meth:`register`.
        """
        try:
            self._ask(requests.UNREGISTER, self.instance_id)
        except ServerUnreachable:
            return False
        return True

    def clear(self) -> None:
        """Drop everything the server holds that no one has locked."""
        self._ask("clear")

    def close(self) -> None:
        """Unregister, if registered, and disconnect. Harmless to repeat.

        An unreachable server does not keep the client from closing.
        """
        if self._closed:
            return
        self._closed = True
        try:
            with contextlib.suppress(ServerUnreachable):
                self.unregister()
        finally:
            self._lmcache.close()

    def __enter__(self) -> WorkerClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # -- registration ----------------------------------------------------------------------

    def register(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        *,
        block_size: int,
        store_mode: StoreMode = StoreMode.AUTO,
    ) -> Transport:
        """Register the paged KV caches, one tensor a layer, with the server.

        Args:
            kv_caches: layer name to paged tensor, in layer order; all of one layout.
            block_size: tokens a block.
            store_mode: which transfer context of LMCache is used.

        Returns:
            The transport that worker and server agreed on.

        Raises:
            ValueError: the caches are not of a supported layout, the server's chunk size is not
                a multiple of ``block_size``, or the device does not offer the mode that
                ``LMCACHE_MP_TRANSFER_MODE`` asks for.
            RuntimeError: this client has registered before and not unregistered.
            ServerUnreachable: no answer in time.
        """
        if self._context is not None:
            raise RuntimeError("KV caches are registered already; call unregister() first")
        if block_size < 1 or self.chunk_size % block_size:
            raise ValueError(
                f"block_size={block_size} does not divide the server's chunk size of "
                f"{self.chunk_size} tokens; start `lmcache server` with a --chunk-size that is a "
                f"multiple of the block size"
            )
        caches = dict(kv_caches)
        context = self._lmcache.create_context(caches, self.instance_id, store_mode)
        try:
            self._lmcache.register(
                context,
                self.instance_id,
                caches,
                self.model_name,
                self.world_size,
                self.chunk_size // block_size,
                self.timeout,
            )
        except BaseException as error:
            context.close()
            if isinstance(error, TimeoutError):
                raise ServerUnreachable(
                    f"the LMCache server at {self.url} did not confirm the registration within "
                    f"{self.timeout:g} s"
                ) from error
            raise
        self._context, self._kv_caches, self._block_size = context, caches, block_size
        return self.transport

    @property
    def transfer_context(self) -> Any:
        """LMCache's transfer context, for callers that drive it themselves.

        Raises:
            RuntimeError: nothing is registered.
        """
        if self._context is None:
            raise RuntimeError("no KV caches are registered; call register() first")
        return self._context

    @property
    def transport(self) -> Transport:
        """The transport agreed at registration."""
        # The context's class tells (all versions): the server offers shared memory by naming a
        # segment, and LMCache's worker takes it whenever it is offered.
        from lmcache.v1.multiprocess.transfer_context import EngineDrivenContextShm

        inner = self.transfer_context.engine_driven_context
        shared = isinstance(inner, EngineDrivenContextShm)
        return Transport.SHARED_MEMORY if shared else Transport.PICKLE

    @property
    def is_async(self) -> bool:
        """Whether stores run on LMCache's threads rather than in the caller's."""
        from lmcache.v1.multiprocess.transfer_context import AsyncEngineDrivenTransferContext

        return isinstance(self.transfer_context, AsyncEngineDrivenTransferContext)

    def unregister(self) -> None:
        """Wait for stores in flight, then take the KV caches back from the server.

        Does nothing if nothing is registered.

        Raises:
            ServerUnreachable: no answer in time; the local side is released all the same.
        """
        context, self._context = self._context, None
        if context is None:
            return
        try:
            # Before the request: a store that commits after it would find no registration.
            context.flush_inflight_stores()
            future = self._lmcache.unregister(context, self.instance_id)
            if future is not None and not future.wait(self.timeout):
                raise ServerUnreachable(
                    f"the LMCache server at {self.url} did not confirm the end of the "
                    f"registration within {self.timeout:g} s"
                )
        finally:
            context.close()
            self._kv_caches = {}

    # -- lookup, store, retrieve -------------------------------------------------------------

    def lookup(self, token_ids: Sequence[int], *, request_id: str) -> int:
        """How many tokens from the start of ``token_ids`` the server holds, in whole chunks.

        Read locks are taken on them; see the class.

        Raises:
            ServerUnreachable: no answer in time.
        """
        end = len(token_ids) // self.chunk_size * self.chunk_size
        # Cut by hand: 0.5.4's server hashes every token it is sent and does not look at `end`.
        key = self._key(token_ids[:end], 0, end, request_id, worker_id=None)
        self._ask("lookup", key, self._kv_readers)
        deadline = time.monotonic() + self.timeout
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise ServerUnreachable(
                    f"the lookup of request {request_id!r} was not over after {self.timeout:g} s"
                )
            # The server holds its answer back until the prefetch is over, at most so long.
            chunks = self._ask("wait_prefetch_status", request_id, min(left, 5.0), timeout=left + 5)
            if chunks is not None:
                return int(chunks) * self.chunk_size

    def free_lookup(
        self,
        token_ids: Sequence[int],
        *,
        request_id: str,
        start: int = 0,
        end: int | None = None,
    ) -> None:
        """Give back the read locks that a lookup took on ``[start, end)`` without retrieving."""
        start, end = self._range(token_ids, start, end)
        key = self._key(token_ids[:end], start, end, request_id, worker_id=None)
        self._ask("free_lookup_locks", key, self._kv_readers)

    def submit_store(
        self,
        token_ids: Sequence[int],
        block_ids: Sequence[int],
        *,
        request_id: str,
        start: int = 0,
        end: int | None = None,
    ) -> PendingStore:
        """Store the KV of tokens ``[start, end)``, which lies in ``block_ids`` in this order.

        The blocks may be written only after the store is over, or after
        :meth:`flush_inflight_stores`. Writes that were issued before on the current stream are
        waited for.

        Args:
            token_ids: all tokens of the sequence from its first on, at least up to ``end``.
            block_ids: the blocks of ``[start, end)``.
            request_id: names the request in the server's session.
            start: first token, a multiple of the chunk size.
            end: token after the last one, a multiple of the chunk size; default: the last whole
                chunk.

        Raises:
            ValueError: range and blocks do not fit.
            RuntimeError: nothing is registered. A device operation that fails is a store that
                comes to False; LMCache logs it.
        """
        context = self.transfer_context
        start, end = self._range(token_ids, start, end)
        self._check_blocks(block_ids, start, end)
        key = self._key(token_ids[:end], start, end, request_id, worker_id=self.worker_id)
        event = self._lmcache.recorded_event(context, self.is_async)
        future = context.submit_store(
            request_id,
            key,
            *self._lmcache.transfer_arguments(self.instance_id),
            self._kv_caches,
            [list(block_ids)],
            event,
            self.chunk_size // self._block_size,
        )
        return PendingStore(future, event, self.timeout)

    def store(
        self,
        token_ids: Sequence[int],
        block_ids: Sequence[int],
        *,
        request_id: str,
        start: int = 0,
        end: int | None = None,
    ) -> bool:
        """:meth:`submit_store`, and wait for it.

        Returns:
            True if every chunk is on the server, False if LMCache gave the store up.
        """
        return self.submit_store(
            token_ids, block_ids, request_id=request_id, start=start, end=end
        ).result()

    def retrieve(
        self,
        token_ids: Sequence[int],
        block_ids: Sequence[int],
        *,
        request_id: str,
        start: int = 0,
        end: int | None = None,
        skip_first_n_tokens: int = 0,
    ) -> bool:
        """Retrieve the KV of tokens ``[start, end)`` into ``block_ids``, in this order.

        Args:
            token_ids: all tokens of the sequence from its first on, at least up to ``end``.
            block_ids: the blocks to write.
            request_id: the lookup's.
            start: first token, a multiple of the chunk size.
            end: token after the last one, a multiple of the chunk size; default: the last whole
                chunk.
            skip_first_n_tokens: so many tokens from ``start`` on are not written (they are in
                blocks that other requests share); a multiple of the block size.

        Returns:
            True if every block was written, False if a chunk was gone or a device operation
            failed (LMCache logs which).

        Raises:
            ValueError: range and blocks do not fit.
            RuntimeError: nothing is registered.
        """
        context = self.transfer_context
        start, end = self._range(token_ids, start, end)
        self._check_blocks(block_ids, start, end)
        key = self._key(token_ids[:end], start, end, request_id, worker_id=self.worker_id)
        event = self._lmcache.recorded_event(context, self.is_async)
        future = context.submit_retrieve(
            request_id,
            key,
            *self._lmcache.transfer_arguments(self.instance_id),
            self._kv_caches,
            [list(block_ids)],
            event,
            self.chunk_size // self._block_size,
            skip_first_n_tokens=skip_first_n_tokens,
        )
        return PendingStore(future, event, self.timeout).result()

    def flush_inflight_stores(self) -> None:
        """Return when no store reads a block any more, as an engine does before it preempts."""
        self.transfer_context.flush_inflight_stores()

    def end_session(self, request_id: str) -> None:
        """Tell the server that the request is over; before the last worker of its model leaves.

        Raises:
            ServerUnreachable: no answer in time. LMCache's servers also give none where they fail,
                as 0.5.6 does for a looked-up request whose model has no registration any more.
        """
        self._ask("end_session", request_id)

    # -- keys ----------------------------------------------------------------------------

    def _range(self, token_ids: Sequence[int], start: int, end: int | None) -> tuple[int, int]:
        chunk = self.chunk_size
        last = len(token_ids) if end is None else end
        if end is None:
            last = last // chunk * chunk
        if start < 0 or start % chunk or last % chunk or not start < last <= len(token_ids):
            raise ValueError(
                f"tokens [{start}, {last}) of {len(token_ids)}: expected a non-empty range whose "
                f"ends are multiples of the server's chunk size, {chunk}"
            )
        return start, last

    def _check_blocks(self, block_ids: Sequence[int], start: int, end: int) -> None:
        needed = (end - start) // self._block_size
        if len(block_ids) != needed:
            raise ValueError(
                f"{len(block_ids)} block ids for tokens [{start}, {end}): expected {needed} "
                f"blocks of {self._block_size} tokens"
            )

    def _key(
        self,
        token_ids: Sequence[int],
        start: int,
        end: int,
        request_id: str,
        *,
        worker_id: int | None,
    ) -> Any:
        from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey

        fields = {
            "model_name": self.model_name,
            "world_size": self.world_size,
            "worker_id": worker_id,
            "token_ids": tuple(token_ids),
            "start": start,
            "end": end,
            "request_id": request_id,
            # Unknown to 0.5.4, which reckons the readers from the lookup's second argument;
            # required by the servers of 0.5.5 and later.
            "num_kv_readers": self._kv_readers,
        }
        known = {field.name for field in dataclasses.fields(IPCCacheServerKey)}
        if "token_bytes" in known:  # 0.5.7, in place of token_ids.
            fields["token_bytes"] = np.asarray(token_ids, ">u4").tobytes()
        return IPCCacheServerKey(**{name: fields[name] for name in fields if name in known})
