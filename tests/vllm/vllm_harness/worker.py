# SPDX-License-Identifier: Apache-2.0
"""A worker process: does with a connector what vLLM-RBLN's worker and model runner do.

Read from vllm_rbln 0.12.0, ``v1/worker/rbln_worker.py`` (``initialize_from_config``,
``compile_or_warm_up_model``) and ``v1/worker/rbln_model_runner.py`` (``execute_model``); the
connector's life within a step is vLLM's own ``KVConnectorModelRunnerMixin``.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_harness.kv import Geometry


@dataclass
class WorkerConfig:
    """What an engine tells a worker at its start."""

    vllm_config: Any
    kv_cache_config: Any
    rank: int
    geometry: Geometry
    finalize: bool = True
    device: str = "rbln"
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class Row:
    """One scheduled request: its tokens up to the end of the step, and its block table."""

    request_id: str
    tokens: list[int]
    blocks: list[int]
    num_computed: int


class WrongKVError(AssertionError):
    """A forward pass would have read KV that is not the KV of its tokens."""


class Runner:
    """The worker's side of an engine."""

    def __init__(self, config: WorkerConfig) -> None:
        from vllm.distributed.kv_transfer import kv_transfer_state
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

        from vllm_harness.kv import PagedCache

        os.environ.update(config.environment)
        self._config = config
        config.vllm_config.parallel_config.rank = config.rank
        self._state = kv_transfer_state
        self.connector = KVConnectorFactory.create_connector(
            config.vllm_config, KVConnectorRole.WORKER, config.kv_cache_config
        )
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        try:
            self.cache = PagedCache(config.geometry, config.rank, config.device)
            self.connector.register_kv_caches(dict(self.cache.layers))
            self.connector.set_host_xfer_buffer_ops(lambda *_: None)
            if config.finalize:
                self.finalize()
        except BaseException:
            self.close()
            raise

    def finalize(self) -> None:
        """What the worker does after warm-up."""
        from vllm_rbln.distributed.kv_transfer.kv_connector.v1.utils import (
            finalize_kv_cache_registrations,
        )

        finalize_kv_cache_registrations(self.connector)

    def replace_caches(self, geometry: Geometry) -> None:
        """What a dynamic KV resize does: new tensors, registered again."""
        from vllm_harness.kv import PagedCache

        self.cache = PagedCache(geometry, self._config.rank, self._config.device)
        self.connector.register_kv_caches(dict(self.cache.layers))
        self.finalize()

    def step(self, scheduler_output: Any, rows: list[Row]) -> Any:
        """One ``execute_model``; returns the KV connector's output."""
        from vllm.forward_context import set_forward_context
        from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

        self.connector.handle_preemptions(scheduler_output.kv_connector_metadata)
        for copy in getattr(scheduler_output, "kv_cache_copy_ops", ()):
            self.cache.synchronize()
            self.cache.copy(copy.src_block_id, copy.dst_block_id, copy.num_tokens)
        if not rows:
            output = KVConnectorModelRunnerMixin.kv_connector_no_forward(
                scheduler_output, self._config.vllm_config
            )
            return output.kv_connector_output
        self.cache.synchronize()
        with (
            set_forward_context(None, self._config.vllm_config),
            KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(scheduler_output) as output,
        ):
            for name in self.cache.layers:
                self.connector.wait_for_layer_load(name)
            for row in rows:
                wrong = self.cache.check(row.blocks, row.tokens[: row.num_computed])
                if wrong:
                    raise WrongKVError(
                        f"request {row.request_id}, {row.num_computed} tokens: {wrong}"
                    )
            for row in rows:
                self.cache.write(row.blocks, row.tokens, row.num_computed)
            for name, layer in self.cache.layers.items():
                self.connector.save_kv_layer(name, layer, None)
        return output

    def check(self, blocks: list[int], tokens: list[int]) -> str | None:
        self.cache.synchronize()
        return self.cache.check(blocks, tokens)

    def fill(self, block: int, byte: int) -> None:
        self.cache.synchronize()
        self.cache.fill(block, byte)
        self.cache.synchronize()

    def holds_only(self, block: int, byte: int) -> bool:
        self.cache.synchronize()
        return self.cache.holds_only(block, byte)

    def children(self) -> list[Any]:
        return list(getattr(self.connector, "_connectors", [self.connector]))

    def adapter(self) -> Any:
        """The LMCache adapter of the connector, or of its LMCache child."""
        (found,) = [c.worker_adapter for c in self.children() if hasattr(c, "worker_adapter")]
        return found

    def close(self) -> None:
        self._state._KV_CONNECTOR_AGENT = None
        self.connector.shutdown()


class _Server:
    """Answers the calls of the test process."""

    def __init__(self) -> None:
        from vllm_rbln.patches.kv_connector_factory import register_rbln_kv_connectors

        register_rbln_kv_connectors()
        self.runner: Runner | None = None

    def ping(self) -> str:
        import torch
        from lmcache.v1.platform import current_device_spec

        return f"{type(current_device_spec).__module__} {torch.rbln.device_count()}"

    def start(self, config: WorkerConfig) -> None:
        self.stop()
        self.runner = Runner(config)

    def stop(self) -> None:
        runner, self.runner = self.runner, None
        if runner is not None:
            runner.close()

    def run(self, function: Any, *arguments: Any) -> Any:
        """Call a function of a test module with the runner."""
        return function(self.runner, *arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)


def main() -> None:
    """Serve calls on the inherited pipe until it closes."""
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    faulthandler.enable()
    pipe = Connection(int(sys.argv[1]))
    server = _Server()
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            break
        started = time.monotonic()
        try:
            answer: tuple[bool, Any] = (True, getattr(server, name)(*arguments))
        except BaseException as exc:
            traceback.print_exc()
            answer = (False, exc)
        print(f"-- {name}: {time.monotonic() - started:.3f} s", flush=True)
        try:
            pipe.send(answer)
        except Exception as exc:
            pipe.send((False, RuntimeError(f"{name}: {answer[1]!r} ({exc!r})")))
    server.stop()


if __name__ == "__main__":
    # Under the name that the test process pickles its classes by.
    importlib.import_module("vllm_harness.worker").main()
