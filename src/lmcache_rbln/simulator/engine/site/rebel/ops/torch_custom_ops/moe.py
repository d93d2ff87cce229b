# SPDX-License-Identifier: Apache-2.0
"""`torch.ops.rbln_custom_ops`: mixture of experts, as called in vLLM-RBLN 0.12.0,
`vllm_rbln/model_executor/layers/fused_moe`."""

from typing import Any

import torch

from ... import errors
from .. import moe
from .registration import Namespace


def _moe_glu(
    hidden: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    routing: torch.Tensor,
    activation: str,
    expert_map: torch.Tensor | None = None,
    gate_bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    for name, value in (
        ("expert_map", expert_map),
        ("gate_bias", gate_bias),
        ("up_bias", up_bias),
        ("down_bias", down_bias),
    ):
        if value is not None:
            raise errors.not_modelled(f"custom_moe_glu with {name}")
    return moe.moe_glu(hidden, gate, up, down, routing, activation)


def _like_hidden(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.empty_like(hidden)


_namespace = Namespace("rbln_custom_ops")
_namespace.define(
    "custom_moe_glu",
    "(Tensor hidden, Tensor gate, Tensor up, Tensor down, Tensor routing, str activation, "
    "Tensor? expert_map=None, Tensor? gate_bias=None, Tensor? up_bias=None, "
    "Tensor? down_bias=None) -> Tensor",
    _moe_glu,
    _like_hidden,
)
for _name in (
    "custom_moe_glu_mxfp4",
    "custom_moe_glu_w8a8",
    "custom_moe_glu_group_dequantize",
    "ccl_all2all_x_kernel",
    "ccl_combine_receive",
    "ccl_combine_send",
    "ccl_dispatch_receive",
    "ccl_dispatch_send",
):
    _namespace.refuse(_name)
