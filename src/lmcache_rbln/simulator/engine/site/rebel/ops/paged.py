# SPDX-License-Identifier: Apache-2.0
"""A paged cache: tokens of one sequence, spread over blocks that a table names.

`pages` is always [num_blocks, heads, block_size, dim], a view of the engine's cache, so a write
reaches the device's memory.
"""

import torch


def kv_pages(kv_cache: torch.Tensor, block_axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The key pages and the value pages of one layer's cache.

    Args:
        kv_cache: [num_blocks, 2, heads, 1, block_size, dim] with `block_axis` 0, or
            [2, num_blocks, heads, 1, block_size, dim] with `block_axis` 1.

    Raises:
        ValueError: if the shape is not one of these.
    """
    kv_axis = 1 - block_axis
    if kv_cache.dim() != 6 or kv_cache.shape[kv_axis] != 2 or kv_cache.shape[3] != 1:
        expected = ("[num_blocks, 2, heads", "[2, num_blocks, heads")[block_axis]
        raise ValueError(
            f"a KV cache of shape {list(kv_cache.shape)}; expected {expected}, 1, block_size, dim]"
        )
    key, value = kv_cache.unbind(kv_axis)
    return key.squeeze(2), value.squeeze(2)


def table_rows(block_tables: torch.Tensor, batch: int) -> list[list[int]]:
    """Block ids of each sequence. A one-dimensional table is that of the only sequence."""
    rows: list[list[int]] = block_tables.reshape(batch, -1).tolist()
    return rows


def starts(seq_idx: torch.Tensor, batch: int) -> list[int]:
    """The position of each sequence's first new token."""
    return [int(row[0]) for row in seq_idx.reshape(batch, -1).tolist()]


def write(pages: torch.Tensor, table: list[int], start: int, tokens: torch.Tensor) -> None:
    """Store `tokens` [heads, length, dim] at positions `start` and on.

    Padding that would lie behind the table's last block is dropped.
    """
    block_size = pages.shape[2]
    length = tokens.shape[1]
    done = 0
    while done < length:
        index, offset = divmod(start + done, block_size)
        if index >= len(table):
            return
        count = min(block_size - offset, length - done)
        pages[table[index], :, offset : offset + count] = tokens[:, done : done + count]
        done += count


def read(pages: torch.Tensor, table: list[int], count: int) -> torch.Tensor:
    """The first `count` tokens of a sequence, [heads, count, dim], or all that its table holds."""
    block_size = pages.shape[2]
    count = min(count, len(table) * block_size)
    used = table[: -(-count // block_size)]
    tokens = pages[used].transpose(0, 1).flatten(1, 2)
    return tokens[:, :count]
