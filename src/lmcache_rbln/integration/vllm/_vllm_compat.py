# SPDX-License-Identifier: Apache-2.0
"""What the connector has to know of vLLM's and vLLM-RBLN's insides.

Each touch says what it does, why, for which versions, and what makes it obsolete.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any


def with_extra_config(vllm_config: Any, extra_config: Mapping[str, Any]) -> Any:
    """A vLLM configuration that differs only in its connector's extra config.

    What: shallow copies of ``VllmConfig`` and of its ``kv_transfer_config``.
    Why: LMCache reads its settings from there, and the configuration given is the engine's.
    vLLM's ``MultiConnector`` makes its children's configurations the same way.
    Versions: vLLM 0.30.
    Obsolete: once LMCache's connector takes its settings as an argument.
    """
    changed = copy.copy(vllm_config)
    changed.kv_transfer_config = copy.copy(vllm_config.kv_transfer_config)
    changed.kv_transfer_config.kv_connector_extra_config = dict(extra_config)
    return changed


def runs_without_connector(vllm_config: Any) -> bool:
    """Whether vLLM-RBLN runs the model on its optimum path, which has no KV connectors.

    What: the type of ``additional_config`` by name, else the path that vLLM-RBLN publishes to the
    processes it starts.
    Why: ``model_config.model_impl`` does not tell: vLLM-RBLN puts ``auto`` there on both paths.
    Versions: vLLM-RBLN 0.12.0.
    Obsolete: once vLLM-RBLN refuses a connector there itself.
    """
    kind = type(getattr(vllm_config, "additional_config", None)).__name__
    if kind in ("RBLNConfig", "OptimumRBLNConfig"):
        return kind == "OptimumRBLNConfig"
    return os.environ.get("_VLLM_RBLN_RESOLVED_MODEL_IMPL") == "optimum"


def windowed(kv_cache_spec: Any) -> str | None:
    """The kind of KV cache, if it does not keep every token in a place of its own; else None.

    What: whether a group's spec, and each spec inside one for layers of several kinds
    (``UniformTypeKVCacheSpecs``), is of full attention, which MLA's is derived from.
    Why: vLLM has no question for it; a group of sliding windows looks like any other.
    Versions: vLLM 0.30.
    Obsolete: once a spec tells, or LMCache refuses such a group.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    for spec in getattr(kv_cache_spec, "kv_cache_specs", {"": kv_cache_spec}).values():
        if not isinstance(spec, FullAttentionSpec):
            return type(spec).__name__
    return None
