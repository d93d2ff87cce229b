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
    """
    kind = type(getattr(vllm_config, "additional_config", None)).__name__
    if kind in ("RBLNConfig", "OptimumRBLNConfig"):
        return kind == "OptimumRBLNConfig"
    return os.environ.get("_VLLM_RBLN_RESOLVED_MODEL_IMPL") == "optimum"
