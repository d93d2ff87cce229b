# SPDX-License-Identifier: Apache-2.0
"""Paged KV caches with known content, to prove that a cache moves every byte to its place.

The content is a pure function of seed, layer, plane, token, head and byte. So any process can
work out what a block must hold, whatever layout or block size it uses itself, without a word from
the process that stored it. Nothing here uses the code under proof.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Bytes = npt.NDArray[np.uint8]

#: What a wiped block holds: a byte that no freshly allocated memory holds by accident.
WIPED = 0xA5

#: The layouts by name, as in ``LMCACHE_RBLN_KV_LAYOUT``, and MLA.
LAYOUTS = ("blocks_first", "kv_first", "mla")


@dataclass(frozen=True)
class Geometry:
    """Shape of a worker's paged KV cache.

    Attributes:
        layout: one of :data:`LAYOUTS`.
        layers: number of layers.
        blocks: blocks a layer.
        heads: KV heads of this worker; 1 for MLA.
        block_size: tokens a block.
        head_size: elements a head and token; the latent width for MLA.
        dtype: name of the torch dtype.
    """

    layout: str
    layers: int
    blocks: int
    heads: int
    block_size: int
    head_size: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout={self.layout!r}: expected one of {', '.join(LAYOUTS)}")

    @property
    def planes(self) -> int:
        """2 (K and V), or 1 for MLA."""
        return 1 if self.layout == "mla" else 2

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """Shape of one layer's cache, in elements."""
        if self.layout == "mla":
            return (self.blocks, self.block_size, self.head_size)
        inner = (self.heads, 1, self.block_size, self.head_size)
        if self.layout == "blocks_first":
            return (self.blocks, 2, *inner)
        return (2, self.blocks, *inner)

    def token_nbytes(self, itemsize: int) -> int:
        """Bytes of one token, all layers and planes."""
        return self.layers * self.planes * self.heads * self.head_size * itemsize


def known_bytes(
    seed: int, layer: int, tokens: Sequence[int], *, planes: int, heads: int, row_nbytes: int
) -> Bytes:
    """The content of some tokens of one layer.

    Returns:
        Bytes of shape ``[planes, tokens, heads, row_nbytes]``.
    """
    words = -(-row_nbytes // 8)
    state: npt.NDArray[np.uint64] = np.full((1, 1, 1, 1), seed, dtype=np.uint64)
    coordinates = (
        np.full((1, 1, 1, 1), layer, dtype=np.uint64),
        np.arange(planes, dtype=np.uint64).reshape(-1, 1, 1, 1),
        np.asarray(tokens, dtype=np.uint64).reshape(1, -1, 1, 1),
        np.arange(heads, dtype=np.uint64).reshape(1, 1, -1, 1),
        np.arange(words, dtype=np.uint64).reshape(1, 1, 1, -1),
    )
    # Coordinates are mixed in one after the other with the finalizer of splitmix64, a bijection,
    # so that neighbours have nothing in common. Arithmetic is modulo 2**64.
    for coordinate in coordinates:
        state = state * np.uint64(0xD1342543DE82EF95) + coordinate
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    full: Bytes = np.ascontiguousarray(state).view(np.uint8)
    return full[..., :row_nbytes]


class KnownCache:
    """A worker's paged KV cache on a device, and what it must hold.

    Args:
        geometry: its shape.
        device: torch's name of the device.
    """

    def __init__(self, geometry: Geometry, device: str) -> None:
        import torch

        self.geometry = geometry
        self._dtype: torch.dtype = getattr(torch, geometry.dtype)
        self._itemsize = torch.empty((), dtype=self._dtype).element_size()
        self._row_nbytes = geometry.head_size * self._itemsize
        self.layers: dict[str, torch.Tensor] = {
            f"model.layers.{index}.self_attn": torch.empty(
                geometry.layer_shape, dtype=self._dtype, device=device
            )
            for index in range(geometry.layers)
        }
        self.wipe()

    def nbytes(self, tokens: int) -> int:
        """Bytes of the KV of so many tokens."""
        return tokens * self.geometry.token_nbytes(self._itemsize)

    def wipe(self) -> None:
        """Fill every block with :data:`WIPED`."""
        self.write(0, [])

    def write(self, seed: int, placed: Iterable[tuple[int, int]]) -> None:
        """Wipe the cache and put known content into some blocks.

        Args:
            seed: of the content.
            placed: pairs of a block id and the first token whose KV it holds.
        """
        import torch

        placed = list(placed)
        for index, layer in enumerate(self.layers.values()):
            host = torch.from_numpy(self._expected(seed, index, placed))
            layer.copy_(host.view(self._dtype).view(layer.shape))

    def difference(self, seed: int, placed: Iterable[tuple[int, int]]) -> str:
        """Compare every byte with what :meth:`write` would have put there.

        Returns:
            "" if all are equal, else how many are not and where the first of them is.
        """
        import torch

        placed = list(placed)
        wrong = 0
        first = ""
        for index, layer in enumerate(self.layers.values()):
            found = layer.cpu().contiguous().view(torch.uint8).numpy()
            expected = self._expected(seed, index, placed).reshape(found.shape)
            unequal = found != expected
            count = int(np.count_nonzero(unequal))
            if count and not first:
                place = tuple(int(axis[0]) for axis in np.nonzero(unequal))
                block = place[1] if self.geometry.layout == "kv_first" else place[0]
                kind = "" if block in dict(placed) else ", which must not change"
                first = (
                    f"layer {index}, block {block}{kind}: found {int(found[place])}, "
                    f"expected {int(expected[place])} at {list(place)}"
                )
            wrong += count
        return f"{wrong} bytes are wrong; the first: {first}" if wrong else ""

    def _expected(self, seed: int, layer: int, placed: list[tuple[int, int]]) -> Bytes:
        shape = (*self.geometry.layer_shape[:-1], self._row_nbytes)
        host = np.full(shape, WIPED, dtype=np.uint8)
        for block, token in placed:
            content = known_bytes(
                seed,
                layer,
                range(token, token + self.geometry.block_size),
                planes=self.geometry.planes,
                heads=self.geometry.heads,
                row_nbytes=self._row_nbytes,
            )
            for plane in range(self.geometry.planes):
                self._block(host, plane, block)[...] = content[plane].transpose(1, 0, 2)
        return host

    def _block(self, host: Any, plane: int, block: int) -> Any:
        """One plane of one block, as ``[heads, block_size, row_nbytes]``."""
        if self.geometry.layout == "blocks_first":
            return host[block, plane, :, 0]
        if self.geometry.layout == "kv_first":
            return host[plane, block, :, 0]
        return host[block][np.newaxis]
