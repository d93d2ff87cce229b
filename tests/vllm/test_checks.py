# SPDX-License-Identifier: Apache-2.0
"""What cannot work is refused before the first request, with a message that says what to change."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec
from vllm_harness import probes
from vllm_harness.engine import TIMEOUTS, kv_cache_config, prompt, vllm_config, write_model
from vllm_harness.kv import Geometry

from lmcache_rbln.integration.vllm import settings
from lmcache_rbln.integration.vllm.connector import RBLNLMCacheConnectorV1

Servers = Callable[[int], str]
Engines = Callable[..., Any]

#: Nothing listens here.
NOWHERE = "tcp://127.0.0.1:9"


@pytest.fixture
def connect(tmp_path: Path) -> Callable[..., RBLNLMCacheConnectorV1]:
    """Makes a connector as vLLM's factory does, after changes to its configuration."""

    def make(
        url: str = NOWHERE,
        change: Callable[[Any], None] = lambda _: None,
        *,
        geometry: Geometry | None = None,
        cache_config: Any = None,
        role: KVConnectorRole = KVConnectorRole.SCHEDULER,
        policy: str = "recompute",
        **extra: Any,
    ) -> RBLNLMCacheConnectorV1:
        geometry = geometry or Geometry("blocks_first")
        transfer = {
            "kv_connector": "RBLNLMCacheConnectorV1",
            "kv_role": "kv_both",
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": {
                **TIMEOUTS,
                "lmcache.mp.server_urls": url,
                **extra,
            },
        }
        config = vllm_config(write_model(tmp_path / "model", geometry), geometry, transfer)
        change(config)
        return RBLNLMCacheConnectorV1(config, role, cache_config or kv_cache_config(geometry))

    return make


def test_no_server(connect: Any) -> None:
    with pytest.raises(ConnectionError) as failure:
        connect(**{"lmcache.mp.mq_timeout": 1.0})
    for part in (NOWHERE, "lmcache server", "engine_driven", "LMCACHE_RBLN_SERVER"):
        assert part in str(failure.value)


def test_block_size_and_chunk_size(connect: Any, servers: Servers) -> None:
    for role in KVConnectorRole:
        with pytest.raises(ValueError, match=r"64.*multiple of 48.*--chunk-size"):
            connect(servers(64), geometry=Geometry("blocks_first", block_size=48), role=role)


def test_a_server_that_serves_no_engine_driven_worker(
    connect: Any, own_server: Callable[..., Any]
) -> None:
    server = own_server(arguments=["--supported-transfer-mode", "lmcache_driven"])
    with pytest.raises(ConnectionError) as failure:
        connect(server.url, role=KVConnectorRole.WORKER, **{"lmcache.mp.mq_timeout": 8.0})
    assert server.url in str(failure.value)
    assert "--supported-transfer-mode engine_driven" in str(failure.value)


@pytest.mark.parametrize("mode", ["lmcache_driven", "LMCACHE_DRIVEN"])
def test_lmcache_driven(connect: Any, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    with pytest.raises(ValueError, match=f"lmcache.mp.mp_transfer_mode={mode}.*engine_driven"):
        connect(**{"lmcache.mp.mp_transfer_mode": mode})
    monkeypatch.setenv("LMCACHE_MP_TRANSFER_MODE", mode)
    with pytest.raises(ValueError, match=f"LMCACHE_MP_TRANSFER_MODE={mode}.*engine_driven"):
        connect()


def test_the_optimum_path(connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm-rbln 0.12.0: the type of ``additional_config`` is the model path."""
    from vllm_rbln.config import OptimumRBLNConfig, RBLNConfig

    def path(kind: Any) -> Callable[[Any], None]:
        return lambda config: setattr(config, "additional_config", object.__new__(kind))

    with pytest.raises(ValueError, match="--model-impl vllm"):
        connect(change=path(OptimumRBLNConfig))
    with pytest.raises(ConnectionError):
        connect(change=path(RBLNConfig), **{"lmcache.mp.mq_timeout": 1.0})
    monkeypatch.setenv("_VLLM_RBLN_RESOLVED_MODEL_IMPL", "optimum")
    with pytest.raises(ValueError, match="--model-impl vllm"):
        connect()


def test_hybrid_groups(connect: Any) -> None:
    geometry = Geometry("blocks_first")
    config = kv_cache_config(geometry)
    shape = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16}
    config.kv_cache_groups = [
        KVCacheGroupSpec(["model.layers.0.self_attn.attn"], FullAttentionSpec(**shape)),
        KVCacheGroupSpec(
            ["model.layers.1.self_attn.attn"], SlidingWindowSpec(**shape, sliding_window=64)
        ),
    ]
    with pytest.raises(ValueError) as failure:
        connect(cache_config=config)
    for part in ("2 KV cache groups", "SlidingWindowSpec", "--disable-hybrid-kv-cache-manager"):
        assert part in str(failure.value)


def test_sliding_window(connect: Any) -> None:
    config = kv_cache_config(Geometry("blocks_first"))
    spec = SlidingWindowSpec(
        block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, sliding_window=64
    )
    config.kv_cache_groups = [KVCacheGroupSpec(["model.layers.0.self_attn.attn"], spec)]
    with pytest.raises(ValueError, match=r"\(SlidingWindowSpec\).*without a KV connector"):
        connect(cache_config=config)


def test_caches(servers: Servers, engines: Engines) -> None:
    engine = engines(servers(64), Geometry("blocks_first"))
    (worker,) = engine.workers
    with pytest.raises(ValueError, match=r"meta.*VLLM_RBLN_USE_DEVICE_TENSOR=1"):
        worker.call("run", probes.register_meta)
    with pytest.raises(ValueError, match=r"\[64, 512\].*supported: blocks-first HND"):
        worker.call("run", probes.register_strange)
    engine.run_one(prompt(1, 70))
    engine.check_over()


def test_the_policy_fail_is_warned_of(
    connect: Any, servers: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    def warnings() -> list[logging.LogRecord]:
        return [record for record in caplog.records if record.name == logger.name]

    logger = logging.getLogger("lmcache_rbln.connector")
    logger.addHandler(caplog.handler)
    try:
        connect(servers(64)).shutdown()
        assert not warnings()
        connect(servers(64), policy="fail").shutdown()
    finally:
        logger.removeHandler(caplog.handler)
    record = warnings()[0]
    assert record.levelname == "WARNING"
    assert '"kv_load_failure_policy":"recompute"' in record.getMessage()


def test_the_server_by_the_environment(
    connect: Any, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(settings.SERVER_VARIABLE, servers(64))
    connector = connect("")
    assert connector.scheduler_adapter.lmcache_tokens_per_chunk == 64
    connector.shutdown()


@pytest.mark.parametrize(
    ("extra", "variable", "expected"),
    [
        ({}, None, "tcp://127.0.0.1:5555"),
        ({}, "", "tcp://127.0.0.1:5555"),
        ({}, " kv-host:6000 ", "kv-host:6000"),
        ({}, "tcp://[::1]:6000", "tcp://[::1]:6000"),
        ({"lmcache.mp.server_urls": "tcp://a:1"}, "tcp://b:2", "tcp://a:1"),
        ({"lmcache.mp.host": "tcp://a"}, "tcp://b:2", None),
        ({"lmcache.mp.port": 7}, "tcp://b:2", None),
    ],
)
def test_settings(
    monkeypatch: pytest.MonkeyPatch,
    extra: dict[str, Any],
    variable: str | None,
    expected: str | None,
) -> None:
    monkeypatch.delenv(settings.SERVER_VARIABLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(settings.SERVER_VARIABLE, variable)
    found = settings.with_server({**extra, "other": 1})
    assert found.get(settings.SERVER_URLS_KEY) == expected
    assert found["other"] == 1


@pytest.mark.parametrize(
    "text",
    ["kv-host", "tcp://kv-host", "kv-host:0", "kv-host:70000", "a:1,b:2", "tcp://a b:5", ":5"],
)
def test_settings_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(settings.SERVER_VARIABLE, text)
    with pytest.raises(ValueError, match=r"LMCACHE_RBLN_SERVER=.*expected one like tcp://"):
        settings.with_server({})
