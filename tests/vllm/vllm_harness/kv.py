# SPDX-License-Identifier: Apache-2.0
"""KV that is a function of (layer, token, position), so that every block's content is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

LAYOUTS = ("blocks_first", "kv_first", "mla")

#: vLLM's layout on other devices, ``[2, num_blocks, block_size, num_heads, head_size]``.
HOST_LAYOUT = "nhd"

#: What a block holds before anything is written to it.
WIPED = 0xA5

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


@dataclass(frozen=True)
class Geometry:
    """The KV cache of one worker. Tokens a block, heads of one rank, elements a head."""

    layout: str
    block_size: int = 16
    num_blocks: int = 64
    num_layers: int = 2
    num_heads: int = 2
    head_size: int = 8
    dtype: str = "bfloat16"

    @property
    def itemsize(self) -> int:
        return {"bfloat16": 2, "float16": 2, "float32": 4}.get(self.dtype, 1)

    @property
    def is_mla(self) -> bool:
        return self.layout == "mla"

    @property
    def planes(self) -> int:
        return 1 if self.is_mla else 2

    @property
    def heads(self) -> int:
        return 1 if self.is_mla else self.num_heads

    @property
    def width(self) -> int:
        return self.num_heads * self.head_size if self.is_mla else self.head_size

    @property
    def shape(self) -> tuple[int, ...]:
        block = (self.num_heads, 1, self.block_size, self.head_size)
        return {
            "blocks_first": (self.num_blocks, 2, *block),
            "kv_first": (2, self.num_blocks, *block),
            HOST_LAYOUT: (2, self.num_blocks, self.block_size, self.num_heads, self.head_size),
            "mla": (self.num_blocks, self.block_size, self.width),
        }[self.layout]


def expected(g: Geometry, rank: int, layer: int, tokens: Any, positions: Any) -> np.ndarray:
    """Content as unsigned words: ``[planes, heads, tokens, width]``; the same on all MLA ranks."""
    token = np.asarray(tokens, np.uint64)[None, None, :, None]
    position = np.asarray(positions, np.uint64)[None, None, :, None]
    plane = np.arange(g.planes, dtype=np.uint64)[:, None, None, None]
    head = np.arange(g.heads, dtype=np.uint64)[None, :, None, None] + np.uint64(
        0 if g.is_mla else rank * g.num_heads
    )
    element = np.arange(g.width, dtype=np.uint64)[None, None, None, :]
    mixed = token
    for part in (position, np.uint64(layer), plane, head, element):
        mixed = (mixed * np.uint64(6364136223846793005) + part + np.uint64(1)) ^ (
            mixed >> np.uint64(29)
        )
    return (mixed >> np.uint64(33)).astype(_WORDS[g.itemsize])


class PagedCache:
    """The KV caches of one worker, on its NPU (or on the host, for another backend)."""

    def __init__(self, geometry: Geometry, rank: int, device: str) -> None:
        import torch

        self.geometry, self.rank = geometry, rank
        g = geometry
        self._torch = torch
        self._dtype = getattr(torch, g.dtype)
        # Integers cross without being interpreted: not every dtype has arithmetic on the host.
        self._word = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[g.itemsize]
        wiped = torch.full((int(np.prod(g.shape)) * g.itemsize,), WIPED, dtype=torch.uint8)
        wiped = wiped.view(self._dtype).view(g.shape)
        self.layers = {
            f"model.layers.{i}.self_attn.attn": wiped.to(device, copy=True)
            for i in range(g.num_layers)
        }
        self._pinned = device.startswith("rbln")
        self._in_flight: list[Any] = []

    def _views(self, layer: Any, block: int) -> list[Any]:
        """One view ``[block_size, width]`` a plane and head of a block."""
        g = self.geometry
        if g.is_mla:
            return [layer[block]]
        if g.layout == HOST_LAYOUT:
            return [layer[p, block, :, h] for p in range(g.planes) for h in range(g.heads)]
        planes = layer[block] if g.layout == "blocks_first" else layer[:, block]
        return [planes[p, h, 0] for p in range(g.planes) for h in range(g.heads)]

    def write(self, blocks: list[int], tokens: list[int], start: int) -> None:
        """Write positions ``[start, len(tokens))`` as a forward pass would: asynchronously."""
        g = self.geometry
        positions = np.arange(start, len(tokens))
        for index, layer in enumerate(self.layers.values()):
            content = expected(g, self.rank, index, tokens[start:], positions)
            host = self._torch.from_numpy(
                content.view(f"i{g.itemsize}" if g.itemsize > 1 else "u1")
            )
            host = host.flatten(0, 1)
            if self._pinned:
                host = host.pin_memory()
                self._in_flight.append(host)
            for slot in range(start // g.block_size, -(-len(tokens) // g.block_size)):
                first = max(start, slot * g.block_size)
                last = min(len(tokens), (slot + 1) * g.block_size)
                offset = first - slot * g.block_size
                for run, view in zip(host, self._views(layer, blocks[slot]), strict=True):
                    view[offset : offset + last - first].copy_(
                        run[first - start : last - start].view(self._dtype), non_blocking=True
                    )

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first tokens of a block, as vLLM-RBLN's sub-block prefix cache does."""
        for layer in self.layers.values():
            for old, new in zip(
                self._views(layer, source), self._views(layer, target), strict=True
            ):
                new[:num_tokens].copy_(old[:num_tokens])

    def synchronize(self) -> None:
        if self._pinned:
            self._torch.rbln.synchronize()
        self._in_flight.clear()

    def read(self, layer: Any, block: int) -> np.ndarray:
        """A block's words, ``[planes, heads, block_size, width]``."""
        g = self.geometry
        if g.is_mla:
            host = layer[block].cpu()[None, None]
        elif g.layout == HOST_LAYOUT:
            host = layer[:, block].transpose(1, 2)
        elif g.layout == "blocks_first":
            host = layer[block].cpu()[:, :, 0]
        else:
            host = self._torch.stack([layer[0, block].cpu(), layer[1, block].cpu()])[:, :, 0]
        words = host.contiguous().view(self._word).numpy()
        return words.view(_WORDS[g.itemsize])

    def check(self, blocks: list[int], tokens: list[int]) -> str | None:
        """What differs from the KV of these tokens, or None."""
        g = self.geometry
        for slot in range(-(-len(tokens) // g.block_size)):
            first = slot * g.block_size
            part = tokens[first : first + g.block_size]
            positions = np.arange(first, first + len(part))
            for index, layer in enumerate(self.layers.values()):
                found = self.read(layer, blocks[slot])[:, :, : len(part)]
                right = expected(g, self.rank, index, part, positions)
                if not np.array_equal(found, right):
                    wrong = np.flatnonzero((found != right).any(axis=(0, 1, 3)))
                    return (
                        f"layer {index}, block {blocks[slot]}: positions "
                        f"{first + wrong[0]}..{first + wrong[-1]} ({len(wrong)}) are wrong"
                    )
        return None

    def fill(self, block: int, byte: int) -> None:
        """Fill a block of every layer with one byte."""
        for layer in self.layers.values():
            for view in self._views(layer, block):
                nbytes = view.numel() * self.geometry.itemsize
                host = self._torch.full((nbytes,), byte, dtype=self._torch.uint8)
                view.copy_(host.view(self._dtype).view(view.shape))

    def holds_only(self, block: int, byte: int) -> bool:
        """Whether a block of every layer holds nothing but that byte."""
        return all(
            bool((self.read(layer, block).view(np.uint8) == byte).all())
            for layer in self.layers.values()
        )
