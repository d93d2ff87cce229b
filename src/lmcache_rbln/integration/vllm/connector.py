# SPDX-License-Identifier: Apache-2.0
"""``RBLNLMCacheConnectorV1``: LMCache's multi-process connector for vLLM on RBLN NPUs.

vLLM-RBLN registers the class by this module's name. It is ``LMCacheMPConnector`` plus what an NPU
needs: registration waits until KV memory exists, what cannot work is refused before the first
request, and no block is given back or stored too early.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
from lmcache.logging import init_logger
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole

from lmcache_rbln import kv_layout
from lmcache_rbln.integration.vllm import _vllm_compat, settings
from lmcache_rbln.integration.vllm.load_reservations import BlockPool, LoadReservations
from lmcache_rbln.lmcache_compat import connector as compat

__all__ = ["RBLNLMCacheConnectorV1"]

logger = init_logger("lmcache_rbln.connector")

_MODE_VARIABLE = "LMCACHE_MP_TRANSFER_MODE"


class RBLNLMCacheConnectorV1(LMCacheMPConnector):  # type: ignore[misc]  # LMCache is untyped
    """LMCache for vLLM-RBLN: ``--kv-transfer-config '{"kv_connector":"RBLNLMCacheConnectorV1",
    "kv_role":"kv_both","kv_load_failure_policy":"recompute"}'``.

    Args:
        vllm_config: The engine's configuration. The server is taken from
            ``kv_connector_extra_config`` (the keys of ``LMCacheMPConnector``), else from
            ``LMCACHE_RBLN_SERVER``, else it is ``tcp://127.0.0.1:5555``.
        role: Scheduler or worker.
        kv_cache_config: The engine's KV cache groups.

    Raises:
        ValueError: The configuration cannot work; the message says what to change.
        ConnectionError: The server does not answer, or does not serve engine-driven workers.
        RuntimeError: LMCache's own connector is not one that this one was written for.
    """

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None
    ) -> None:
        _refuse_unworkable(vllm_config, kv_cache_config)
        extra_config = settings.with_server(
            vllm_config.kv_transfer_config.kv_connector_extra_config
        )
        try:
            super().__init__(
                _vllm_compat.with_extra_config(vllm_config, extra_config), role, kv_cache_config
            )
        except ConnectionError as exc:
            raise ConnectionError(
                f"no LMCache server answers at {_server(extra_config)}. Start one with `lmcache "
                "server --supported-transfer-mode engine_driven ...`, or name another by "
                f"{settings.SERVER_VARIABLE} or kv_connector_extra_config "
                f"({settings.SERVER_URLS_KEY})"
            ) from exc
        self._caches: dict[str, torch.Tensor] = {}
        self._registered: dict[str, torch.Tensor] = {}
        self._loads = compat.LoadsInFlight()
        self._reservations = LoadReservations(vllm_config.cache_config.block_size)
        if role == KVConnectorRole.WORKER:
            compat.require_adapter(self.worker_adapter)
            compat.keep_stores(self.worker_adapter)
            if not compat.serves_engine_driven(self.worker_adapter):
                raise ConnectionError(
                    f"the LMCache server at {_server(extra_config)} does not serve engine-driven "
                    "workers, and KV on an RBLN NPU can be moved in no other way. Start it with "
                    "--supported-transfer-mode engine_driven (or auto)"
                )
        elif vllm_config.kv_transfer_config.kv_load_failure_policy == "fail":
            logger.warning(
                'kv_load_failure_policy is "fail" (vLLM\'s default): a request whose cached KV '
                "cannot be loaded fails, though the engine could recompute it. Set "
                '"kv_load_failure_policy":"recompute" in --kv-transfer-config (with MultiConnector: '
                "in the outer one)."
            )

    # -- registration --------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Remember the caches; they are registered once their memory exists.

        Caches handed over later replace these, before and after they are registered.

        Args:
            kv_caches: One tensor a layer, by layer name.

        Raises:
            ValueError: They are of no layout that can be moved; see ``kv_layout``.
        """
        kv_layout.resolve(list(kv_caches.values()))
        self._caches = dict(kv_caches)

    def finalize_kv_cache_registration(self) -> None:
        """Register the caches with the server, unless these are registered.

        vLLM-RBLN calls it after warm-up. Where nobody does, the first step registers.

        Raises:
            ValueError: The caches do not fit the server or LMCache.
            ConnectionError: The server does not confirm.
        """
        if not self._caches or _same(self._caches, self._registered):
            return
        if self._registered:
            logger.info("the KV caches were replaced; registering the new ones")
            compat.unregister(self.worker_adapter)
        super().register_kv_caches(dict(self._caches))
        self._registered = dict(self._caches)
        compat.start_heartbeat(self.worker_adapter)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step; the first one registers the caches where nobody has."""
        super().bind_connector_metadata(connector_metadata)
        if self.role == KVConnectorRole.WORKER:
            self.finalize_kv_cache_registration()
            compat.suspect_silence(self.worker_adapter)

    # -- worker --------------------------------------------------------------------------------

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Return when no store reads a block of a preempted request any more."""
        super().handle_preemptions(kv_connector_metadata)
        if getattr(kv_connector_metadata, "need_flush_before_forward", False):
            compat.flush_while_unreachable(self.worker_adapter)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The requests whose stores are over, and those whose loads are; each of them once."""
        abandoned = compat.abandoned_loads(self._connector_metadata)
        result: tuple[set[str] | None, set[str] | None] = super().get_finished(
            finished_req_ids - abandoned
        )
        return result

    # -- scheduler -----------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Take the scheduler's block pool."""
        super().bind_gpu_block_pool(gpu_block_pool)
        self._reservations.bind(gpu_block_pool)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens can be loaded; None while that, or room for all of it, is not known."""
        if not self._reservations.admits(request):
            return None, False
        matched: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        return matched

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """A request has its blocks; with ``num_external_tokens`` its load begins."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens > 0:
            self._reservations.start(request, len(blocks.get_block_ids()[0]))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """What the workers do at this step."""
        self._reservations.end(scheduler_output.num_scheduled_tokens)
        compat.set_progress(self.request_trackers, scheduler_output)
        metadata = super().build_connector_meta(scheduler_output)
        self._loads.send(metadata)
        return metadata

    def update_connector_output(self, connector_output: Any) -> None:
        """Take in what the workers report."""
        self._loads.report(connector_output.finished_recving)
        super().update_connector_output(connector_output)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request is over; whether its blocks stay until its stores are over as well."""
        self._reservations.end([request.request_id])
        delay, parameters = super().request_finished(request, block_ids)
        if self._loads.abandon(request.request_id):
            # vLLM itself keeps the blocks until the load is reported.
            return False, parameters
        return delay, parameters


def _server(extra_config: Mapping[str, Any]) -> str:
    urls = extra_config.get(settings.SERVER_URLS_KEY)
    if urls:
        return ", ".join(urls) if isinstance(urls, list) else str(urls)
    host = extra_config.get("lmcache.mp.host", "tcp://localhost")
    return f"{host}:{extra_config.get('lmcache.mp.port', 5555)}"


def _same(caches: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> bool:
    return caches.keys() == others.keys() and all(
        cache is others[name] for name, cache in caches.items()
    )


def _refuse_unworkable(vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuse what would fail later, and late."""
    if _vllm_compat.runs_without_connector(vllm_config):
        raise ValueError(
            "model_impl is optimum, and that path of vLLM-RBLN never hands its KV caches to a "
            "connector; start vLLM with --model-impl vllm"
        )
    extra_config = vllm_config.kv_transfer_config.kv_connector_extra_config
    where, mode = settings.MODE_KEY, extra_config.get(settings.MODE_KEY)
    if mode is None:
        where, mode = _MODE_VARIABLE, os.environ.get(_MODE_VARIABLE, "auto")
    if str(mode).lower() == "lmcache_driven":
        raise ValueError(
            f"{where}={mode}: the LMCache server cannot reach the memory of an RBLN NPU; use "
            "engine_driven, or leave it unset"
        )
    groups = getattr(kv_cache_config, "kv_cache_groups", ())
    if len(groups) > 1:
        kinds = ", ".join(sorted({type(group.kv_cache_spec).__name__ for group in groups}))
        raise ValueError(
            f"the model has {len(groups)} KV cache groups ({kinds}); engine-driven transfer moves "
            "one. Serve a model whose layers all have the same kind of attention, or start vLLM "
            "with --disable-hybrid-kv-cache-manager if it supports this model so"
        )
    for group in groups:
        if (kind := _vllm_compat.windowed(group.kv_cache_spec)) is not None:
            # The blocks of a window shift, or are given up, under tokens that stay hashed.
            raise ValueError(
                f"the model's KV cache ({kind}) does not keep every token in a place of its own, "
                "as a cache of whole prefixes needs; serve a model with full attention, or start "
                "vLLM without a KV connector"
            )
