# SPDX-License-Identifier: Apache-2.0
"""What the stub tests share: the operations that LMCache itself selected, on the simulated NPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="session")
def ops() -> Any:
    """The operations of LMCache's selected backend, which must be ours."""
    import lmcache

    from lmcache_rbln.device_ops import RblnDeviceOps

    assert type(lmcache.device_ops) is RblnDeviceOps
    return lmcache.device_ops


@pytest.fixture(scope="session")
def transfer(ops: Any) -> Callable[..., None]:
    """``DeviceOps.multi_layer_block_kv_transfer`` with what LMCache would pass by itself filled in."""
    from lmcache.lmcache_native import EngineKVFormat, TransferDirection

    class ShapeDesc:
        def __init__(self, block_size: int) -> None:
            self.bs = block_size

    def call(
        direction: str,
        layers: Any,
        chunks: Any,
        block_ids: Any,
        *,
        block_size: int,
        chunk_tokens: int,
        mla: bool = False,
        skip: int = 0,
        kv_format: Any = None,
    ) -> None:
        default = EngineKVFormat.NL_X_NB_BS_HS if mla else EngineKVFormat.NL_X_TWO_NB_NH_ONE_BS_HS
        ops.multi_layer_block_kv_transfer(
            layers,
            chunks,
            block_ids,
            "rbln",
            {"gather": TransferDirection.D2H, "scatter": TransferDirection.H2D}.get(
                direction, direction
            ),
            ShapeDesc(block_size),
            chunk_tokens,
            default if kv_format is None else kv_format,
            skip,
        )

    return call
