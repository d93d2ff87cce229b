# SPDX-License-Identifier: Apache-2.0
"""The attention operators: `torch.ops.rbln_custom_ops` (blocks-first caches), and the math for
`torch.ops.rbln_triton_ops` (K/V-first caches), which vLLM-RBLN defines itself.

Schemas follow the calls in vLLM-RBLN 0.12.0, `vllm_rbln/v1/attention`.
"""

from collections.abc import Callable
from typing import Any

import torch

from ... import errors
from .. import attention
from .registration import Namespace

BLOCKS_FIRST = 0
KV_FIRST = 1


def _flash_causal(block_axis: int) -> Callable[..., torch.Tensor]:
    def run(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: torch.Tensor,
        scale: torch.Tensor,
        seq_idx: torch.Tensor,
        block_tables: torch.Tensor,
        dummy: torch.Tensor,
        sinks: torch.Tensor | None = None,
        k_quantize_scale: torch.Tensor | None = None,
        v_quantize_scale: torch.Tensor | None = None,
        cache_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        common = (q, k, v, kv_cache, float(scale), seq_idx, block_tables)
        if cache_dtype is not None:
            if k_quantize_scale is None or v_quantize_scale is None:
                raise ValueError("an fp8 KV cache needs k_quantize_scale and v_quantize_scale")
            return attention.fp8_paged_attention(
                *common,
                block_axis=block_axis,
                k_scale=float(k_quantize_scale),
                v_scale=float(v_quantize_scale),
                cache_dtype=cache_dtype,
                sinks=sinks,
            )
        # Without a cache dtype the cache's own is real and the scales do not apply.
        return attention.paged_attention(*common, block_axis=block_axis, sinks=sinks)

    return run


def _causal(block_axis: int) -> Callable[..., torch.Tensor]:
    def run(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: torch.Tensor,
        seq_idx: torch.Tensor,
        scale: torch.Tensor,
        block_tables: torch.Tensor,
        dummy: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return attention.paged_attention(
            q,
            k,
            v,
            kv_cache,
            float(scale),
            seq_idx,
            block_tables,
            block_axis=block_axis,
            sinks=sinks,
        )

    return run


def _shifting_window(block_axis: int) -> Callable[..., torch.Tensor]:
    def run(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: torch.Tensor,
        cache_seq_len: torch.Tensor,
        cache_offset: torch.Tensor,
        scale: torch.Tensor,
        block_tables: torch.Tensor,
        dummy: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return attention.shifting_window_attention(
            q,
            k,
            v,
            kv_cache,
            cache_seq_len,
            cache_offset,
            float(scale),
            block_tables,
            block_axis=block_axis,
            sinks=sinks,
        )

    return run


def _shifting_window_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor,
    cache_seq_len: torch.Tensor,
    cache_offset: torch.Tensor,
    scale: torch.Tensor,
    block_tables: torch.Tensor,
    dummy: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    if attn_mask is not None:
        raise errors.not_modelled("sliding_window_attention_naive_decode with attn_mask")
    return _shifting_window(BLOCKS_FIRST)(
        q, k, v, kv_cache, cache_seq_len, cache_offset, scale, block_tables, dummy, sinks
    )


def _appending_window(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor,
    seq_idx: torch.Tensor,
    scale: torch.Tensor,
    block_tables: torch.Tensor,
    window_size: int,
    is_causal: bool,
    attn_mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    if not is_causal:
        raise errors.not_modelled("sliding_window_attention_v1 with is_causal=False")
    if attn_mask is not None:
        raise errors.not_modelled("sliding_window_attention_v1 with attn_mask")
    return attention.paged_attention(
        q,
        k,
        v,
        kv_cache,
        float(scale),
        seq_idx,
        block_tables,
        block_axis=BLOCKS_FIRST,
        window=window_size,
        sinks=sinks,
    )


def _latent(
    q: torch.Tensor,
    kv_c_normed: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    seq_idx: torch.Tensor,
    block_tables: torch.Tensor,
    scale: torch.Tensor,
) -> torch.Tensor:
    return attention.latent_attention(
        q, kv_c_normed, k_pe, kv_cache, float(scale), seq_idx, block_tables
    )


def _like_q(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.empty_like(q)


def _latent_shape(q: torch.Tensor, latent: torch.Tensor, *args: Any) -> torch.Tensor:
    return q.new_empty(*q.shape[:3], latent.shape[-1])


_QKV = "(Tensor q, Tensor k, Tensor v, Tensor(a!) kv_cache, "
_PHASES = ("prefill", "decode")

_namespace = Namespace("rbln_custom_ops")
for _phase in _PHASES:
    _namespace.define(
        f"flash_causal_attention_naive_{_phase}",
        _QKV + "Tensor scale, Tensor seq_idx, Tensor block_tables, Tensor dummy, "
        "Tensor? sinks=None, Tensor? k_quantize_scale=None, Tensor? v_quantize_scale=None, "
        "ScalarType? cache_dtype=None) -> Tensor",
        _flash_causal(BLOCKS_FIRST),
        _like_q,
    )
    _namespace.define(
        f"causal_attention_naive_{_phase}",
        _QKV + "Tensor seq_idx, Tensor scale, Tensor block_tables, Tensor dummy, "
        "Tensor? sinks=None) -> Tensor",
        _causal(BLOCKS_FIRST),
        _like_q,
    )
    _namespace.define(
        f"paged_flash_causal_mla_naive_{_phase}",
        "(Tensor q, Tensor kv_c_normed, Tensor k_pe, Tensor(a!) kv_cache, Tensor seq_idx, "
        "Tensor block_tables, Tensor scale) -> Tensor",
        _latent,
        _latent_shape,
    )
    # Masks instead of causality, for drafters that look ahead.
    _namespace.refuse(f"attention_naive_{_phase}")
    _namespace.refuse(f"flash_attention_naive_{_phase}")
_WINDOW = (
    _QKV + "Tensor cache_seq_len, Tensor cache_offset, Tensor scale, Tensor block_tables, "
    "Tensor dummy, "
)
_namespace.define(
    "sliding_window_attention_naive_prefill",
    _WINDOW + "Tensor? sinks=None) -> Tensor",
    _shifting_window(BLOCKS_FIRST),
    _like_q,
)
_namespace.define(
    "sliding_window_attention_naive_decode",
    _WINDOW + "Tensor? attn_mask=None, Tensor? sinks=None) -> Tensor",
    _shifting_window_decode,
    _like_q,
)
_namespace.define(
    "sliding_window_attention_v1",
    _QKV + "Tensor seq_idx, Tensor scale, Tensor block_tables, int window_size, bool is_causal, "
    "Tensor? attn_mask=None, Tensor? sinks=None) -> Tensor",
    _appending_window,
    _like_q,
)
_namespace.refuse("sparse_attn_deepseek_mla")
_namespace.refuse("sparse_attn_deepseek_indexer")

# Operators whose body is a kernel for the closed compiler; a graph runs these instead.
TRITON_OPERATORS: dict[str, Callable[..., torch.Tensor]] = {
    f"rbln_triton_ops::{name}_{phase}": make(KV_FIRST)
    for phase in _PHASES
    for name, make in (
        ("flash_causal_attention_naive", _flash_causal),
        ("causal_attention_naive", _causal),
        ("sliding_window_attention_naive", _shifting_window),
    )
}
