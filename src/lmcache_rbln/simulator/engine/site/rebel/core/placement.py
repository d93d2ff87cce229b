# SPDX-License-Identifier: Apache-2.0
"""Where the device holds a graph's inputs, as far as sizing the KV cache needs it."""

from collections.abc import Sequence
from typing import Any

import torch

from .program_capture import Dim, InputSpec, PhysicalPlacement, ShardPlacement


def input_specs(
    graph: torch.fx.GraphModule, example_inputs: Sequence[Any]
) -> tuple[InputSpec, ...]:
    """One spec for each tensor input. An input with a dynamic dimension also gets a placement:
    whole, as torch sees it, on the first chiplet, where the simulated NPU keeps all memory."""
    names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    return tuple(
        _spec(name, value)
        for name, value in zip(names, example_inputs, strict=True)
        if isinstance(value, torch.Tensor)
    )


def _spec(name: str, value: torch.Tensor) -> InputSpec:
    dims = tuple(_dim(size) for size in value.shape)
    placement = None
    if any(not isinstance(dim, int) for dim in dims):
        placement = PhysicalPlacement(
            shape=dims,
            dtype=str(value.dtype).removeprefix("torch."),
            shards=(ShardPlacement(node_id=0, chiplet_id=0, slice_shape=dims),),
        )
    return InputSpec(name, tuple(_hint(size) for size in value.shape), value.dtype, placement)


def _dim(size: int | torch.SymInt) -> Dim:
    if isinstance(size, torch.SymInt) and size.node.maybe_as_int() is None:
        return ("symbol", str(size.node.expr))
    return int(size)


def _hint(size: int | torch.SymInt) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)
