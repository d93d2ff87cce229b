# SPDX-License-Identifier: Apache-2.0
"""An engine without a model: vLLM's scheduler here, its workers in processes of their own."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vllm_harness.kv import Geometry
from vllm_harness.processes import WorkerProcess
from vllm_harness.worker import Row, WorkerConfig

VOCABULARY = 1000

#: How each connector is named in ``--kv-transfer-config``.
CONNECTORS: dict[str, dict[str, str]] = {
    "rbln": {"kv_connector": "RBLNLMCacheConnectorV1"},
    "stock": {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
    },
}

#: Long enough for a busy machine: a ping that takes longer than the heartbeat's interval makes
#: LMCache drop stores and lookups for a while. Tests of a dead server have shorter ones.
TIMEOUTS = {"lmcache.mp.mq_timeout": 20.0, "lmcache.mp.heartbeat_interval": 5.0}


def write_model(folder: Path, geometry: Geometry, tensor_parallel: int = 1) -> Path:
    """A model folder that vLLM's ``ModelConfig`` accepts; its path is the cache's model name."""
    common = {
        "vocab_size": VOCABULARY + 24,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": geometry.num_layers,
        "num_attention_heads": 8,
        "max_position_embeddings": 1 << 20,
        "torch_dtype": "bfloat16",
    }
    if geometry.is_mla:
        own = {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "num_key_value_heads": 8,
            "kv_lora_rank": geometry.width - 4,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "first_k_dense_replace": 99,
        }
    else:
        own = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_key_value_heads": geometry.num_heads * tensor_parallel,
            "head_dim": geometry.head_size,
        }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**common, **own}))
    return folder


def kv_cache_config(geometry: Geometry) -> KVCacheConfig:
    g = geometry
    dtype = getattr(torch, g.dtype)
    spec: Any
    if g.is_mla:
        spec = MLAAttentionSpec(
            block_size=g.block_size, num_kv_heads=1, head_size=g.width, dtype=dtype
        )
    else:
        spec = FullAttentionSpec(
            block_size=g.block_size, num_kv_heads=g.num_heads, head_size=g.head_size, dtype=dtype
        )
    names = [f"model.layers.{i}.self_attn.attn" for i in range(g.num_layers)]
    page = spec.page_size_bytes
    return KVCacheConfig(
        num_blocks=g.num_blocks,
        kv_cache_tensors=[
            KVCacheTensor(
                size=page * g.num_blocks * g.num_layers,
                layers=names,
                layer_stride=page * g.num_blocks,
                block_stride=page,
            )
        ],
        kv_cache_groups=[KVCacheGroupSpec(names, spec)],
        kv_cache_layout="LBNHC",
    )


def vllm_config(
    model: Path,
    geometry: Geometry,
    transfer: dict[str, Any],
    *,
    tensor_parallel: int = 1,
    max_batched_tokens: int = 512,
    max_seqs: int = 8,
    kv_events: bool = False,
    additional_config: Any = None,
) -> VllmConfig:
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(model),
            skip_tokenizer_init=True,
            max_model_len=1 << 16,
            dtype="bfloat16",
            enforce_eager=True,
        ),
        cache_config=CacheConfig(
            block_size=geometry.block_size,
            enable_prefix_caching=True,
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_seqs,
            max_num_batched_tokens=max_batched_tokens,
            max_model_len=1 << 16,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=False,
        ),
        parallel_config=ParallelConfig(tensor_parallel_size=tensor_parallel),
        device_config=DeviceConfig(device="cpu"),
        kv_transfer_config=KVTransferConfig(**transfer),
        kv_events_config=(
            KVEventsConfig(enable_kv_cache_events=True, publisher="null") if kv_events else None
        ),
    )
    if additional_config is not None:
        config.additional_config = additional_config
    # What the engine core resolves: the first layout that vLLM-RBLN's attention supports.
    config.cache_config.kv_cache_layout = "LBNHC"
    config.cache_config.num_gpu_blocks = geometry.num_blocks
    return config


class Engine:
    """One engine: its scheduler in this process, one worker process a rank.

    Args:
        workers: One process a rank.
        server_url: The LMCache server.
        model: Folder of the model; engines share KV where they share it.
        geometry: KV cache of one rank.
        connector: Key of ``CONNECTORS``.
        policy: ``kv_load_failure_policy``.
        extra: More of ``kv_connector_extra_config``.
        transfer: Instead of all of that, a whole ``kv_transfer_config``.
        scheduler: Makes the scheduler; vLLM's own by default.
    """

    def __init__(
        self,
        workers: Sequence[WorkerProcess],
        server_url: str,
        model: Path,
        geometry: Geometry,
        *,
        connector: str = "rbln",
        policy: str = "recompute",
        extra: dict[str, Any] | None = None,
        transfer: dict[str, Any] | None = None,
        scheduler: Callable[..., Scheduler] = Scheduler,
        finalize: bool = True,
        device: str = "rbln",
        worker_environment: dict[str, str] | None = None,
        max_batched_tokens: int = 512,
        max_seqs: int = 8,
        kv_events: bool = False,
        additional_config: Any = None,
    ) -> None:
        self.workers = list(workers)
        self.geometry = geometry
        if transfer is None:
            transfer = {
                **CONNECTORS[connector],
                "kv_role": "kv_both",
                "kv_load_failure_policy": policy,
                "kv_connector_extra_config": {
                    **TIMEOUTS,
                    "lmcache.mp.server_urls": server_url,
                    **(extra or {}),
                },
            }
        write_model(model, geometry, len(workers))
        self.config = vllm_config(
            model,
            geometry,
            transfer,
            tensor_parallel=len(workers),
            max_batched_tokens=max_batched_tokens,
            max_seqs=max_seqs,
            kv_events=kv_events,
            additional_config=additional_config,
        )
        cache_config = kv_cache_config(geometry)
        for rank, worker in enumerate(self.workers):
            worker.send(
                "start",
                WorkerConfig(
                    self.config,
                    cache_config,
                    rank,
                    geometry,
                    finalize,
                    device,
                    worker_environment or {},
                ),
            )
        for worker in self.workers:
            # A new process imports vLLM first.
            worker.receive(150.0)
        hash_function = get_hash_fn_by_name(self.config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(geometry.block_size, hash_function)
        self.scheduler = scheduler(
            vllm_config=self.config,
            kv_cache_config=cache_config,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=geometry.block_size,
            log_stats=True,
        )
        self.connector: Any = self.scheduler.connector
        self._note_loads()
        self._note_events()
        self._aggregator = KVOutputAggregator.from_connector(self.connector, len(self.workers))
        # LMCache's server keeps sessions by request id, for all engines: as in vLLM, none is used
        # twice.
        self._name = uuid.uuid4().hex[:12]
        self._count = 0
        #: Every request ever added.
        self.requests: dict[str, Request] = {}
        #: Tokens that the scheduler last let the connector load, by request.
        self.loaded: dict[str, int] = {}
        #: Requests in the order of their end.
        self.finished: list[str] = []
        self.preemptions = 0
        #: What the connector gave vLLM to publish.
        self.events: list[Any] = []
        #: The connector's statistics, as the scheduler reports them.
        self.statistics: list[Any] = []
        self.reports: list[Any] = []

    def _note_loads(self) -> None:
        """Note what the scheduler tells the connector of each request; nothing is changed."""
        tell = self.connector.update_state_after_alloc

        def told(request: Request, blocks: Any, num_external_tokens: int) -> None:
            if num_external_tokens:
                self.loaded[request.request_id] = num_external_tokens
            tell(request, blocks, num_external_tokens)

        self.connector.update_state_after_alloc = told

    def _note_events(self) -> None:
        take = self.connector.take_events

        def taken() -> list[Any]:
            events = list(take())
            self.events.extend(events)
            return events

        self.connector.take_events = taken

    # -- requests --------------------------------------------------------------------------

    def add(self, prompt: Sequence[int], max_tokens: int = 1, request_id: str | None = None) -> str:
        self._count += 1
        request_id = request_id or f"{self._name}-{self._count}"
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(
                temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
            ),
            pooling_params=None,
            block_hasher=self._hasher,
        )
        request.sampling_params.update_from_generation_config({}, eos_token_id=None)
        self.requests[request_id] = request
        self.scheduler.add_request(request)
        return request_id

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def generated(self, request_id: str) -> list[int]:
        return list(self.requests[request_id].output_token_ids)

    def blocks(self, request_id: str) -> list[int]:
        (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(request_id)
        return list(blocks)

    # -- steps -----------------------------------------------------------------------------

    def schedule(self) -> tuple[Any, list[Row]]:
        """Schedule a step; the rows are what a model runner would compute."""
        output = self.scheduler.schedule()
        self.preemptions += len(output.preempted_req_ids or ())
        rows = []
        for request_id, scheduled in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            end = request.num_computed_tokens
            rows.append(
                Row(
                    request_id,
                    list(request.all_token_ids[:end]),
                    self.blocks(request_id),
                    end - scheduled,
                )
            )
        return output, rows

    def send(self, output: Any, rows: list[Row]) -> None:
        for worker in self.workers:
            worker.send("step", output, rows)

    def receive(self, output: Any, rows: list[Row], timeout: float = 60.0) -> Any:
        """Take in what the workers did, and let the scheduler have it."""
        sampled = [self._sample(row) for row in rows]
        ids = [row.request_id for row in rows]
        reports = []
        for worker in self.workers:
            report = worker.receive(timeout)
            reports.append(
                ModelRunnerOutput(
                    req_ids=ids,
                    req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
                    sampled_token_ids=sampled,
                    kv_connector_output=report,
                )
            )
        combined = self._aggregator.aggregate(reports)
        assert combined is not None
        self.reports.append(combined.kv_connector_output)
        outputs = self.scheduler.update_from_output(output, combined)
        for group in outputs.values():
            if group.scheduler_stats is not None and group.scheduler_stats.kv_connector_stats:
                self.statistics.append(group.scheduler_stats.kv_connector_stats)
            for item in group.outputs:
                if item.finish_reason is not None:
                    self.finished.append(item.request_id)
        return combined.kv_connector_output

    def step(self, timeout: float = 60.0) -> Any:
        output, rows = self.schedule()
        self.send(output, rows)
        report = self.receive(output, rows, timeout)
        if not rows:
            # Nothing to compute: a load, a lookup or a store is being waited for.
            time.sleep(0.002)
        return report

    def schedule_load(self, request_id: str, timeout: float = 30.0) -> tuple[Any, list[Row]]:
        """Step until a load of the request is scheduled; that step is not sent to the workers."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            output, rows = self.schedule()
            if request_id in self.loaded:
                return output, rows
            self.send(output, rows)
            self.receive(output, rows)
            time.sleep(0.002)
        raise TimeoutError(f"no load of {request_id} was scheduled within {timeout:g} s")

    def run(self, timeout: float = 60.0) -> None:
        """Step until no request is left, and no block is held."""
        deadline = time.monotonic() + timeout
        while self.scheduler.has_requests():
            self.step()
            if time.monotonic() > deadline:
                states = {r.request_id: r.status.name for r in self.scheduler.requests.values()}
                raise TimeoutError(f"after {timeout:g} s these are left: {states}")

    def run_one(self, prompt: Sequence[int], max_tokens: int = 1, timeout: float = 60.0) -> str:
        request_id = self.add(prompt, max_tokens)
        self.run(timeout)
        return request_id

    def _sample(self, row: Row) -> list[int]:
        request = self.scheduler.requests.get(row.request_id)
        if request is None or len(row.tokens) < request.num_tokens:
            return []
        return [next_token(row.tokens)]

    # -- what must hold ----------------------------------------------------------------------

    def check_over(self) -> None:
        """All requests have ended once with the right tokens, and every block is free."""
        assert sorted(self.finished) == sorted(
            r.request_id
            for r in self.requests.values()
            if r.status != RequestStatus.FINISHED_ABORTED
        )
        for request in self.requests.values():
            if request.status == RequestStatus.FINISHED_LENGTH_CAPPED:
                tokens = list(request.prompt_token_ids)
                for token in request.output_token_ids:
                    assert token == next_token(tokens)
                    tokens.append(token)
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == self.geometry.num_blocks - 1

    def forget_local_cache(self) -> None:
        """Drop vLLM's own prefix cache: what comes now comes from the server."""
        assert self.scheduler.reset_prefix_cache()

    def close(self) -> None:
        for worker in self.workers:
            worker.finish()
        self.scheduler.shutdown()


def next_token(tokens: Sequence[int]) -> int:
    """The token that follows: a function of all that stand before it."""
    return 1 + (sum(tokens[-7:]) * 31 + len(tokens) * 17) % (VOCABULARY - 1)


def prompt(seed: int, length: int) -> list[int]:
    """A prompt of so many tokens; prompts of one seed share their beginning."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()
