# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts."""

import torch

from ..errors import not_modelled


def moe_glu(
    hidden: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    routing: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """The weighted sum of the experts' gated feed-forward layers.

    Args:
        hidden: [tokens, width].
        gate, up: [experts, inner, width].
        down: [experts, width, inner].
        routing: [experts, tokens]; zero for an expert that a token does not use.

    Returns:
        Shape and dtype of `hidden`; the sum is float32.

    Raises:
        NotImplementedError: for an activation other than "silu".
    """
    if activation != "silu":
        raise not_modelled(f"custom_moe_glu with activation {activation!r}")
    total = torch.zeros(hidden.shape, dtype=torch.float32)
    for expert in range(gate.shape[0]):
        weight = routing[expert].float()
        rows = weight.nonzero().squeeze(-1)
        x = hidden[rows]
        inner = torch.nn.functional.silu(x @ gate[expert].T) * (x @ up[expert].T)
        total[rows] += weight[rows, None] * (inner @ down[expert].T).float()
    return total.to(hidden.dtype)
