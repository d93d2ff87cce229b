# SPDX-License-Identifier: Apache-2.0
"""Causal attention over a paged cache.

All math is float32 whatever the tensors hold. Queries come grouped by key/value head:
q [batch, kv_heads, group, length, dim], k and v [batch, kv_heads, 1, length, dim].
"""

import torch

from . import paged


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    start: int,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one sequence's new tokens over all its tokens.

    Args:
        q: [kv_heads, group, length, dim]; row i is the token at position `start` + i.
        keys: [kv_heads, total, dim], position 0 first.
        values: [kv_heads, total, value_dim].
        window: each token sees itself and the `window` - 1 tokens before it; None: all.
        sinks: [kv_heads, group] logits of a column that takes probability and has no value.

    Returns:
        float32 [kv_heads, group, length, value_dim]. A padding row that sees no token is zero.
    """
    scores = torch.einsum("hgld,htd->hglt", q.float(), keys.float()) * scale
    row = torch.arange(q.shape[2]).unsqueeze(1) + start
    column = torch.arange(keys.shape[1]).unsqueeze(0)
    visible = column <= row
    if window is not None:
        visible &= column > row - window
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        sink_scores = sinks.float()[:, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink_scores], dim=-1)
    probabilities = scores.softmax(-1)[..., : keys.shape[1]].masked_fill(~visible, 0.0)
    return torch.einsum("hglt,htd->hgld", probabilities, values.float())


def head_sinks(sinks: torch.Tensor | None, kv_heads: int, group: int) -> torch.Tensor | None:
    """One sink a query head, given in any shape, as [kv_heads, group]."""
    return None if sinks is None else sinks.reshape(kv_heads, group)


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor,
    scale: float,
    seq_idx: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    block_axis: int,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Store the new keys and values, then attend over each sequence's whole history.

    Args:
        kv_cache: see `paged.kv_pages`; written in place.
        seq_idx: [batch, ...]; its first column is the position of each first new token.
        block_tables: [batch, blocks], or [blocks] for one sequence.

    Returns:
        Shape and dtype of `q`.
    """
    batch, kv_heads, group = q.shape[:3]
    key_pages, value_pages = paged.kv_pages(kv_cache, block_axis)
    sinks = head_sinks(sinks, kv_heads, group)
    out = torch.empty_like(q)
    tables = paged.table_rows(block_tables, batch)
    for b, (table, start) in enumerate(zip(tables, paged.starts(seq_idx, batch), strict=True)):
        paged.write(key_pages, table, start, k[b, :, 0].to(key_pages.dtype))
        paged.write(value_pages, table, start, v[b, :, 0].to(value_pages.dtype))
        end = start + q.shape[3]
        keys = paged.read(key_pages, table, end)
        values = paged.read(value_pages, table, end)
        out[b] = attend(q[b], keys, values, start, scale, window, sinks).to(q.dtype)
    return out


def fp8_paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor,
    scale: float,
    seq_idx: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    block_axis: int,
    k_scale: float,
    v_scale: float,
    cache_dtype: torch.dtype,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`paged_attention` over a cache of fp8 values kept as bytes.

    A stored element is value / scale, rounded to `cache_dtype` and limited to its range.

    Raises:
        ValueError: if `kv_cache` is not uint8, or `cache_dtype` no fp8 type.
    """
    if kv_cache.dtype != torch.uint8:
        raise ValueError(f"an fp8 KV cache is kept as uint8, this one is {kv_cache.dtype}")
    if cache_dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise ValueError(f"{cache_dtype} is no fp8 KV cache dtype; e4m3fn and e5m2 are")
    batch, kv_heads, group = q.shape[:3]
    key_pages, value_pages = paged.kv_pages(kv_cache.view(cache_dtype), block_axis)
    sinks = head_sinks(sinks, kv_heads, group)
    limit = torch.finfo(cache_dtype).max

    def quantize(tokens: torch.Tensor, unit: float) -> torch.Tensor:
        return (tokens.float() / unit).clamp(-limit, limit).to(cache_dtype)

    out = torch.empty_like(q)
    tables = paged.table_rows(block_tables, batch)
    for b, (table, start) in enumerate(zip(tables, paged.starts(seq_idx, batch), strict=True)):
        # torch can't index fp8 tensors with a list of ids; bytes it can.
        for pages, tokens in (
            (key_pages, quantize(k[b, :, 0], k_scale)),
            (value_pages, quantize(v[b, :, 0], v_scale)),
        ):
            paged.write(pages.view(torch.uint8), table, start, tokens.view(torch.uint8))
        end = start + q.shape[3]
        keys = paged.read(key_pages.view(torch.uint8), table, end).view(cache_dtype)
        values = paged.read(value_pages.view(torch.uint8), table, end).view(cache_dtype)
        out[b] = attend(
            q[b], keys.float() * k_scale, values.float() * v_scale, start, scale, None, sinks
        ).to(q.dtype)
    return out


def shifting_window_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor,
    held: torch.Tensor,
    ends: torch.Tensor,
    scale: float,
    block_tables: torch.Tensor,
    *,
    block_axis: int,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sliding-window attention over one block a sequence, whose contents shift.

    The block holds the last `window` tokens, the oldest first, and is as long as the window.

    Args:
        held: tokens of each sequence in its block before this step, at most `window`.
        ends: `held` plus the new tokens of each sequence, padding not counted.
        block_tables: the sequence's block, [batch, 1] or [1].
    """
    batch, kv_heads, group = q.shape[:3]
    key_pages, value_pages = paged.kv_pages(kv_cache, block_axis)
    window = key_pages.shape[2]
    sinks = head_sinks(sinks, kv_heads, group)
    out = torch.empty_like(q)
    tables = paged.table_rows(block_tables, batch)
    for b, start in enumerate(paged.starts(held, batch)):
        end = int(ends.reshape(batch, -1)[b, 0])
        first = max(end - window, 0)
        joined = []
        for pages, tokens in ((key_pages, k[b, :, 0]), (value_pages, v[b, :, 0])):
            block = pages[tables[b][0]]
            both = torch.cat([block[:, :start], tokens.to(pages.dtype)], dim=1)
            kept = both[:, first : first + window]
            block[:, : kept.shape[1]] = kept
            joined.append(both)
        keys, values = joined
        out[b] = attend(q[b], keys, values, start, scale, window, sinks).to(q.dtype)
    return out


def latent_attention(
    q: torch.Tensor,
    latent: torch.Tensor,
    rope_key: torch.Tensor,
    kv_cache: torch.Tensor,
    scale: float,
    seq_idx: torch.Tensor,
    block_tables: torch.Tensor,
) -> torch.Tensor:
    """Multi-head latent attention in the latent space: one key for all heads, whose first part
    is also the value.

    Args:
        q: [batch, heads, length, rank + rope_dim].
        latent: [batch, length, rank].
        rope_key: [batch, length, rope_dim].
        kv_cache: [num_blocks, block_size, rank + rope_dim]; written in place.

    Returns:
        [batch, heads, length, rank], dtype of `q`.
    """
    batch, heads, length = q.shape[:3]
    rank = latent.shape[-1]
    pages = kv_cache.unsqueeze(1)
    new = torch.cat([latent, rope_key], dim=-1)
    out = q.new_empty(batch, heads, length, rank)
    tables = paged.table_rows(block_tables, batch)
    for b, (table, start) in enumerate(zip(tables, paged.starts(seq_idx, batch), strict=True)):
        paged.write(pages, table, start, new[b].unsqueeze(0).to(pages.dtype))
        keys = paged.read(pages, table, start + length)
        out[b] = attend(q[b].unsqueeze(0), keys, keys[..., :rank], start, scale)[0].to(q.dtype)
    return out
