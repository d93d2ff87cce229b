# SPDX-License-Identifier: Apache-2.0
"""Scheduler side: loads are admitted only while each of them can still become a whole request.

A request whose KV is being loaded holds blocks, makes no progress and is not preempted. It needs
the rest of its blocks when the load is over. vLLM 0.30's own scheduler keeps them free for it;
vLLM-RBLN 0.12.0's does not, so that several loads can take the pool until none of them can start,
and the engine takes empty steps for ever. Three requests on 17 blocks are enough: one of 8 blocks
that loads 1, and two of 8 that load 7 each.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol


class BlockPool(Protocol):
    """What is asked of vLLM's block pool."""

    def get_num_free_blocks(self) -> int:
        """Blocks that can be allocated, those of the prefix cache included."""


class LoadReservations:
    """The requests between the start of their load and their first step, and what they still need.

    Args:
        block_size: tokens a block of the engine's one KV cache group.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._pool: BlockPool | None = None
        self._missing: dict[str, int] = {}

    def bind(self, pool: BlockPool) -> None:
        """Take the scheduler's block pool. Before that every load is admitted."""
        self._pool = pool

    def admits(self, request: Any) -> bool:
        """Whether all of ``request`` fits beside what earlier loads still need.

        Where no load is outstanding the scheduler's own check is enough.
        """
        reserved = sum(n for name, n in self._missing.items() if name != request.request_id)
        if self._pool is None or not reserved:
            return True
        return self._blocks(request) + reserved <= self._pool.get_num_free_blocks()

    def start(self, request: Any, held: int) -> None:
        """The load of ``request`` begins; it holds ``held`` blocks."""
        self._missing[request.request_id] = max(self._blocks(request) - held, 0)

    def end(self, request_ids: Iterable[str]) -> None:
        """These requests were scheduled, or are gone."""
        for request_id in request_ids:
            self._missing.pop(request_id, None)

    def _blocks(self, request: Any) -> int:
        return -(-int(request.num_tokens) // self._block_size)
