# SPDX-License-Identifier: Apache-2.0
"""`torch.ops.rbln`: sampling, as called in vLLM-RBLN 0.12.0, `vllm_rbln/v1/sample`."""

from typing import Any

import torch

from .. import sampling
from .registration import Namespace


def _top_k_top_p(
    probs: torch.Tensor, k: torch.Tensor | None = None, p: torch.Tensor | None = None
) -> torch.Tensor:
    return sampling.top_k_top_p(probs, k, p)


def _one_per_row(rows: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return rows.new_empty(rows.shape[:-1], dtype=torch.int32)


_namespace = Namespace("rbln")
_namespace.define("argmax", "(Tensor logits) -> Tensor", sampling.argmax, _one_per_row)
_namespace.define(
    "top_k_top_p",
    "(Tensor probs, Tensor? k=None, Tensor? p=None) -> Tensor",
    _top_k_top_p,
    _one_per_row,
)
_namespace.refuse("rejection_sample")
