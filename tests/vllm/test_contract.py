# SPDX-License-Identifier: Apache-2.0
"""What vLLM-RBLN expects of this package, each point read from vllm-rbln 0.12.0.

A new vLLM-RBLN fails here first, and by name.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import subprocess
import sys

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import supports_hma
from vllm.utils.func_utils import supports_kw

from lmcache_rbln import __version__
from lmcache_rbln.integration.vllm.connector import RBLNLMCacheConnectorV1

#: The release that the contract was read from.
READ_FROM = "0.12.0"


def test_the_release_read_from() -> None:
    assert importlib.metadata.version("vllm-rbln") == READ_FROM


def test_version_satisfies_the_extra() -> None:
    """``pip install vllm-rbln[kv-connectors]`` 0.12.0 takes this package."""
    wanted = [
        requirement
        for requirement in map(Requirement, importlib.metadata.requires("vllm-rbln") or ())
        if requirement.name == "lmcache-rbln"
    ]
    assert wanted, "vllm-rbln 0.12.0 asks for lmcache-rbln"
    for requirement in wanted:
        assert requirement.marker is not None
        assert requirement.marker.evaluate({"extra": "kv-connectors"})
        assert requirement.specifier.contains(Version(__version__))
    assert importlib.metadata.version("lmcache-rbln") == __version__


def test_registered_by_name() -> None:
    """vllm-rbln 0.12.0, ``patches/kv_connector_factory.py`` and its shim."""
    found = KVConnectorFactory.get_connector_class_by_name("RBLNLMCacheConnectorV1")
    assert found is RBLNLMCacheConnectorV1


def test_dynamic_kv_sizing_is_open_for_it() -> None:
    """vllm-rbln 0.12.0, ``v1/worker/utils.py``: by the name in ``kv_transfer_config``."""
    from vllm_rbln.v1.worker import utils

    assert RBLNLMCacheConnectorV1.__name__ in utils.DYNAMIC_KV_SUPPORTED_CONNECTORS


def test_finalize_is_found() -> None:
    """vllm-rbln 0.12.0, ``distributed/kv_transfer/kv_connector/v1/utils.py``."""
    from vllm_rbln.distributed.kv_transfer.kv_connector.v1 import utils

    connector = object.__new__(RBLNLMCacheConnectorV1)
    assert isinstance(connector, utils.SupportsKVCacheRegistrationFinalize)
    # Loads go out at start_load_kv; none is held for this hook.
    assert not isinstance(connector, utils.SupportsDeferredLoad)
    hook = inspect.signature(RBLNLMCacheConnectorV1.finalize_kv_cache_registration)
    assert list(hook.parameters) == ["self"]


def test_the_model_paths_configuration() -> None:
    """vllm-rbln 0.12.0, ``config.py`` and ``envs.py``: what tells the optimum path."""
    from vllm_rbln import config, envs

    assert config.RBLNConfig.__name__ == "RBLNConfig"
    assert config.OptimumRBLNConfig.__name__ == "OptimumRBLNConfig"
    assert envs.RESOLVED_MODEL_IMPL_ENV == "_VLLM_RBLN_RESOLVED_MODEL_IMPL"


@pytest.mark.parametrize("hook", ["register_kv_caches", "set_host_xfer_buffer_ops"])
def test_hooks_of_registration(hook: str) -> None:
    """vllm-rbln 0.12.0, ``RBLNModelRunner.register_kv_caches_with_connector``."""
    from vllm_rbln.v1.worker.rbln_model_runner import RBLNModelRunner

    source = inspect.getsource(RBLNModelRunner.register_kv_caches_with_connector)
    assert f".{hook}(" in source
    assert callable(getattr(RBLNLMCacheConnectorV1, hook))


def test_cache_shapes() -> None:
    """vllm-rbln 0.12.0's attention backend: the two HND layouts that ``kv_layout`` knows."""
    from vllm_rbln.v1.attention.backends.flash_attention import RBLNFlashAttentionBackend

    source = inspect.getsource(RBLNFlashAttentionBackend.get_kv_cache_shape)
    assert "[2, num_kv_heads, 1, block_size, head_size]" in source
    assert "shape.insert(axis, num_blocks)" in source


def test_vllm_takes_it() -> None:
    """vLLM 0.30's factory: three arguments, and the hybrid memory allocator's interface."""
    assert supports_kw(RBLNLMCacheConnectorV1, "kv_cache_config")
    assert supports_hma(RBLNLMCacheConnectorV1)


def test_importing_it_first_selects_this_backend() -> None:
    """vLLM imports the connector before anything else of LMCache."""
    program = """
import json
from vllm_rbln.distributed.kv_transfer.kv_connector.v1 import rbln_lmcache_connector
from lmcache.v1.platform import current_device_spec as spec
print(json.dumps([type(spec).__module__, spec.device_type]))
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False
    )
    assert result.returncode == 0, result.stderr
    module, device = json.loads(result.stdout.splitlines()[-1])
    assert (module.split(".")[0], device) == ("lmcache_rbln", "rbln")
