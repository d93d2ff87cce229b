# SPDX-License-Identifier: Apache-2.0
"""KV cache geometry of well-known models, and what a row of the benchmark measures."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Model:
    """What a model keeps of each token.

    Attributes:
        layers: Layers with a KV cache.
        heads: KV heads; 1 for MLA.
        head_size: Elements a head; for MLA, of the latent and the rotary part together.
        mla: Whether attention is multi-head latent attention.
    """

    layers: int
    heads: int
    head_size: int
    mla: bool = False

    def on_one_of(self, tensor_parallel: int) -> Model:
        """What one of so many workers keeps.

        Raises:
            ValueError: The heads cannot be divided among them.
        """
        if self.mla or tensor_parallel == 1:
            return self
        more, less = max(self.heads, tensor_parallel), min(self.heads, tensor_parallel)
        if more % less:
            raise ValueError(
                f"--tensor-parallel {tensor_parallel}: expected a divisor or a multiple of the "
                f"model's {self.heads} KV heads"
            )
        return Model(self.layers, max(1, self.heads // tensor_parallel), self.head_size)


#: From each model's published config.json: num_hidden_layers, num_key_value_heads, head_dim (or
#: hidden_size / num_attention_heads); for MLA, kv_lora_rank + qk_rope_head_dim.
MODELS = {
    "llama-3.2-1b": Model(16, 8, 64),
    "llama-3.1-8b": Model(32, 8, 128),
    "llama-3.3-70b": Model(80, 8, 128),
    "mistral-7b": Model(32, 8, 128),
    "mixtral-8x7b": Model(32, 8, 128),
    "qwen2.5-7b": Model(28, 4, 128),
    "qwen3-8b": Model(36, 8, 128),
    "qwen3-32b": Model(64, 8, 128),
    "qwen3-30b-a3b": Model(48, 4, 128),
    "exaone-3.5-7.8b": Model(32, 8, 128),
    "solar-10.7b": Model(48, 8, 128),
    "deepseek-v2-lite": Model(27, 1, 576, mla=True),
    "deepseek-v3": Model(61, 1, 576, mla=True),
    "kimi-k2": Model(61, 1, 576, mla=True),
}


@dataclass(frozen=True)
class Row:
    """One thing that is measured.

    Attributes:
        layout: ``blocks_first``, ``kv_first`` or ``mla``.
        layers: Layers.
        heads: KV heads of the worker.
        head_size: Elements a head and token.
        block_size: Tokens a block.
        blocks_per_chunk: Blocks a chunk.
        scattered: Whether block ids are random, not consecutive.
        dtype: Name of the torch dtype.
        chunks: Chunks a transfer.
    """

    layout: str
    layers: int
    heads: int
    head_size: int
    block_size: int
    blocks_per_chunk: int
    scattered: bool
    dtype: str
    chunks: int

    @property
    def planes(self) -> int:
        """2 (K and V), or 1 for MLA."""
        return 1 if self.layout == "mla" else 2

    @property
    def blocks(self) -> int:
        """Blocks a transfer."""
        return self.chunks * self.blocks_per_chunk

    def token_nbytes(self, itemsize: int) -> int:
        """Bytes of one token in all layers, with elements of ``itemsize`` bytes."""
        return self.planes * self.layers * self.heads * self.head_size * itemsize

    @property
    def title(self) -> str:
        """Layout, block size, blocks a chunk and order of ids."""
        name = {"blocks_first": "blocks-first", "kv_first": "K/V-first", "mla": "MLA"}[self.layout]
        ids = ", scattered" if self.scattered else ""
        return f"{name}, block {self.block_size}, {self.blocks_per_chunk} a chunk{ids}"


def row_of(
    layout: str,
    model: Model,
    block_size: int,
    blocks_per_chunk: int,
    scattered: bool,
    dtype: str = "bfloat16",
    itemsize: int = 2,
    mib: float = 256,
) -> Row:
    """A row of as many whole chunks as come nearest to ``mib`` MiB."""
    row = Row(
        layout, model.layers, model.heads, model.head_size,
        block_size, blocks_per_chunk, scattered, dtype, chunks=1,
    )  # fmt: skip
    chunk = row.token_nbytes(itemsize) * block_size * blocks_per_chunk
    return replace(row, chunks=max(1, round(mib * 2**20 / chunk)))
