# SPDX-License-Identifier: Apache-2.0
"""The three KV layouts of vLLM-RBLN, and how a block is addressed in each.

====================  =========================================================  ====================
layout                one layer's cache, contiguous                              one block of a layer
====================  =========================================================  ====================
blocks-first HND      ``[num_blocks, 2, num_kv_heads, 1, block_size, head_size]``  one run: K, then V
K/V-first HND         ``[2, num_blocks, num_kv_heads, 1, block_size, head_size]``  two runs: K and V
MLA                   ``[num_blocks, block_size, head_size]``                     one run
====================  =========================================================  ====================

A chunk is token-major in LMCache's wire layout, the same for every device: ``[2, num_layers,
num_tokens, num_kv_heads * head_size]``, or ``[num_layers, num_tokens, head_size]`` for MLA.
"""

from __future__ import annotations

import enum
import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

#: Decides between the HND layouts where the shape fits both.
LAYOUT_VARIABLE = "LMCACHE_RBLN_KV_LAYOUT"

SUPPORTED = (
    "blocks-first HND [num_blocks, 2, num_kv_heads, 1, block_size, head_size], "
    "K/V-first HND [2, num_blocks, num_kv_heads, 1, block_size, head_size] and "
    "MLA [num_blocks, block_size, head_size]"
)

_HINT = (
    "Does vLLM run with --model-impl vllm and VLLM_RBLN_USE_DEVICE_TENSOR=1, on a model whose "
    "layers all have the same kind of attention?"
)


class KVLayout(enum.Enum):
    """A layout of one layer's paged KV cache; the value is what the setting calls it."""

    BLOCKS_FIRST = "blocks_first"
    KV_FIRST = "kv_first"
    MLA = "mla"


@dataclass(frozen=True)
class PagedKV:
    """The paged KV cache of a worker: all layers, in one layout.

    Attributes:
        layout: How each layer is laid out.
        layers: One tensor a layer, contiguous, in the shape of the layout.
        num_blocks: Blocks a layer.
        num_heads: KV heads; 1 for MLA.
        block_size: Tokens a block.
        head_size: Elements a head and token; the latent width for MLA.
    """

    layout: KVLayout
    layers: tuple[torch.Tensor, ...]
    num_blocks: int
    num_heads: int
    block_size: int
    head_size: int

    @property
    def planes(self) -> int:
        """Planes a chunk has: 2 (K and V), or 1 for MLA."""
        return 1 if self.layout is KVLayout.MLA else 2

    @property
    def token_width(self) -> int:
        """Elements of one token in one layer and plane of a chunk."""
        return self.num_heads * self.head_size

    @property
    def dtype(self) -> torch.dtype:
        """Element type of cache and chunk."""
        return self.layers[0].dtype

    @property
    def device(self) -> torch.device:
        """Where all layers live."""
        return self.layers[0].device

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block in one layer, K and V together."""
        return self.planes * self.block_size * self.token_width * self.layers[0].element_size()

    def chunk_shape(self, num_tokens: int) -> tuple[int, ...]:
        """Shape of a chunk of ``num_tokens`` tokens."""
        shape = (len(self.layers), num_tokens, self.token_width)
        return shape if self.layout is KVLayout.MLA else (2, *shape)


def resolve(layers: Sequence[Any]) -> PagedKV:
    """Recognise the layout of a worker's KV cache by shape, and check that all layers agree.

    A non-contiguous layer of shape ``[2, num_blocks, ...]`` whose exchanged axes are contiguous is
    the view by which a blocks-first cache passes through LMCache; the exchange is undone.

    Args:
        layers: One tensor a layer.

    Returns:
        The cache in the shape of its layout.

    Raises:
        ValueError: The layers are none, on ``meta``, of no supported shape, not contiguous,
            empty, overlapping, or differ in shape, strides, dtype or device; or the shape fits
            both HND layouts and ``LMCACHE_RBLN_KV_LAYOUT`` is not set; or that setting does not
            fit the shape.
    """
    if not layers:
        raise ValueError(f"the KV cache has no layers. {_HINT}")
    for index, layer in enumerate(layers):
        if not isinstance(layer, torch.Tensor):
            raise ValueError(
                f"layer {index} of the KV cache is {type(layer).__name__}, expected one tensor a "
                f"layer; supported: {SUPPORTED}. {_HINT}"
            )
    first = layers[0]
    _refuse_unusable(first)
    signature = _signature(first)
    for index, layer in enumerate(layers):
        if _signature(layer) != signature:
            raise ValueError(
                f"the layers of the KV cache differ: layer 0 is {describe(first)}, layer {index} is "
                f"{describe(layer)}; all layers must share shape, strides, dtype and device. {_HINT}"
            )
    _refuse_overlap(layers)
    if first.ndim == 3:
        if _setting() is not None:
            raise ValueError(
                f"{LAYOUT_VARIABLE}={os.environ[LAYOUT_VARIABLE]} does not fit the KV cache "
                f"{describe(first)}, which is MLA; unset it"
            )
        num_blocks, block_size, head_size = first.shape
        return PagedKV(KVLayout.MLA, tuple(layers), num_blocks, 1, block_size, head_size)
    layout, exchanged = _hnd_layout(first)
    own = tuple(layer.transpose(0, 1) for layer in layers) if exchanged else tuple(layers)
    num_blocks = own[0].shape[0 if layout is KVLayout.BLOCKS_FIRST else 1]
    _, _, num_heads, _, block_size, head_size = own[0].shape
    return PagedKV(layout, own, num_blocks, num_heads, block_size, head_size)


def describe(tensor: torch.Tensor) -> str:
    """Shape, strides (where they say something), dtype and device of a tensor, for a message."""
    strides = "" if tensor.is_contiguous() else f" strides {list(tensor.stride())}"
    return f"{list(tensor.shape)}{strides} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def _signature(layer: torch.Tensor) -> tuple[Any, ...]:
    return layer.shape, layer.stride(), layer.dtype, layer.device


def _refuse_overlap(layers: Sequence[torch.Tensor]) -> None:
    """Refuse layers that overlap in part; those that share one cache, as some models' do, may."""
    starts = sorted(set(map(torch.Tensor.data_ptr, layers)))
    nbytes = layers[0].nbytes
    for before, after in itertools.pairwise(starts):
        if after - before < nbytes:
            raise ValueError(
                f"layers of the KV cache overlap: {describe(layers[0])} takes {nbytes} bytes, and two "
                f"of them begin {after - before} bytes apart; each needs memory of its own"
            )


def _setting() -> KVLayout | None:
    text = os.environ.get(LAYOUT_VARIABLE, "").strip().lower()
    if not text:
        return None
    for layout in (KVLayout.BLOCKS_FIRST, KVLayout.KV_FIRST):
        if text == layout.value:
            return layout
    raise ValueError(
        f"{LAYOUT_VARIABLE}={os.environ[LAYOUT_VARIABLE]!r} is unknown; expected blocks_first or "
        "kv_first, or leave it unset"
    )


def _refuse_unusable(layer: torch.Tensor) -> None:
    """Refuse what no layout can be: meta tensors, unknown ranks, empty or strided layers."""
    if layer.device.type == "meta":
        raise ValueError(
            f"the KV cache is {describe(layer)}: a meta tensor has no memory to move. Start vLLM "
            "with VLLM_RBLN_USE_DEVICE_TENSOR=1, and register the cache after it is allocated"
        )
    shape = layer.shape
    hnd = layer.ndim == 6 and shape[3] == 1 and 2 in (shape[0], shape[1])
    if not hnd and layer.ndim != 3:
        raise ValueError(f"the KV cache is {describe(layer)}; supported: {SUPPORTED}. {_HINT}")
    if math.prod(shape) == 0:
        raise ValueError(f"the KV cache is {describe(layer)}: it holds nothing. {_HINT}")
    if not layer.is_contiguous() and not _is_exchanged(layer):
        raise ValueError(
            f"the KV cache is {describe(layer)}: not contiguous. Supported, contiguous: "
            f"{SUPPORTED}. Padded or permuted caches must be registered as they are in memory"
        )


def _is_exchanged(layer: torch.Tensor) -> bool:
    """Whether this is a blocks-first layer with its first two axes exchanged."""
    return (
        layer.ndim == 6
        and layer.shape[0] == 2
        and not layer.is_contiguous()
        and layer.transpose(0, 1).is_contiguous()
    )


def _hnd_layout(layer: torch.Tensor) -> tuple[KVLayout, bool]:
    """The HND layout of a layer, and whether its first two axes are exchanged."""
    setting = _setting()
    exchanged = _is_exchanged(layer)
    if exchanged:
        fits = [KVLayout.BLOCKS_FIRST]
    else:
        fits = [
            layout
            for layout, axis in ((KVLayout.BLOCKS_FIRST, 1), (KVLayout.KV_FIRST, 0))
            if layer.shape[axis] == 2
        ]
    if setting is not None:
        if setting not in fits:
            raise ValueError(
                f"{LAYOUT_VARIABLE}={setting.value} does not fit the KV cache {describe(layer)}, "
                f"which is {fits[0].value}; unset it"
            )
        return setting, exchanged
    if len(fits) > 1:
        raise ValueError(
            f"the KV cache is {describe(layer)}, which with two blocks fits blocks-first and "
            f"K/V-first HND alike. Set {LAYOUT_VARIABLE}=blocks_first (vLLM-RBLN's default "
            "attention) or kv_first, or allocate another number of blocks"
        )
    return fits[0], exchanged
