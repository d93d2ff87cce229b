# SPDX-License-Identifier: Apache-2.0
"""An independent, plain reference of what a transfer must do: one token and head at a time.

Knows nothing of the package: layouts are spelled out as index expressions over raw bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

LAYOUTS = ("blocks_first", "kv_first", "mla")

DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint8,
    torch.int8,
)


@dataclass(frozen=True)
class Geometry:
    """A paged KV cache and how it is cut into chunks."""

    layout: str
    num_layers: int
    num_blocks: int
    num_heads: int
    block_size: int
    head_size: int
    blocks_per_chunk: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def layer_shape(self) -> tuple[int, ...]:
        hnd = (self.num_heads, 1, self.block_size, self.head_size)
        return {
            "blocks_first": (self.num_blocks, 2, *hnd),
            "kv_first": (2, self.num_blocks, *hnd),
            "mla": (self.num_blocks, self.block_size, self.head_size),
        }[self.layout]

    @property
    def chunk_tokens(self) -> int:
        return self.blocks_per_chunk * self.block_size

    def chunk_shape(self, tokens: int | None = None) -> tuple[int, ...]:
        tokens = self.chunk_tokens if tokens is None else tokens
        if self.layout == "mla":
            return (self.num_layers, tokens, self.head_size)
        return (2, self.num_layers, tokens, self.num_heads * self.head_size)

    def random(self, shape: tuple[int, ...], rng: np.random.Generator) -> torch.Tensor:
        """Random bytes as a tensor of the dtype: NaNs and all."""
        raw = rng.integers(0, 256, (*shape[:-1], shape[-1] * self.dtype.itemsize), dtype=np.uint8)
        return torch.from_numpy(raw).view(self.dtype).view(shape)

    def layers(self, rng: np.random.Generator) -> list[torch.Tensor]:
        return [self.random(self.layer_shape, rng) for _ in range(self.num_layers)]


def to_bytes(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a tensor, last axis widened; on the host."""
    tensor = tensor.cpu().contiguous()
    return tensor.view(torch.uint8).numpy().reshape(*tensor.shape[:-1], -1).copy()


def _rows(
    geometry: Geometry,
    layer: np.ndarray,
    chunk: np.ndarray,
    index: int,
    block: int,
    token: int,
    at: int,
):
    """Pairs of (cache row, chunk row) for one token of one block in one layer."""
    width = geometry.head_size * geometry.dtype.itemsize
    if geometry.layout == "mla":
        yield layer[block, token], chunk[index, at]
        return
    for plane in (0, 1):
        for head in range(geometry.num_heads):
            here = (block, plane) if geometry.layout == "blocks_first" else (plane, block)
            yield (
                layer[(*here, head, 0, token)],
                chunk[plane, index, at, head * width : (head + 1) * width],
            )


def _walk(geometry, layers, chunks, block_ids, skip):
    for position, block in enumerate(block_ids):
        if position < skip:
            continue
        chunk, slot = divmod(position, geometry.blocks_per_chunk)
        for index, layer in enumerate(layers):
            for token in range(geometry.block_size):
                at = slot * geometry.block_size + token
                yield from _rows(geometry, layer, chunks[chunk], index, block, token, at)


def gather(
    geometry: Geometry,
    layers: list[np.ndarray],
    chunks: list[np.ndarray],
    block_ids: list[int],
    skip: int = 0,
) -> None:
    """Copy cache rows into chunk rows; all arrays are bytes."""
    for cache_row, chunk_row in _walk(geometry, layers, chunks, block_ids, skip):
        chunk_row[:] = cache_row


def scatter(
    geometry: Geometry,
    layers: list[np.ndarray],
    chunks: list[np.ndarray],
    block_ids: list[int],
    skip: int = 0,
) -> None:
    """Copy chunk rows into cache rows; all arrays are bytes."""
    for cache_row, chunk_row in _walk(geometry, layers, chunks, block_ids, skip):
        cache_row[:] = chunk_row
