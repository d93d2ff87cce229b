# SPDX-License-Identifier: Apache-2.0
"""Where the device holds a graph's inputs, as far as sizing the KV cache needs it."""

import torch

from ..errors import not_modelled
from .program_capture import Dim, InputSpec, PhysicalPlacement, ShardPlacement

# Chiplets of a simulated NPU; each holds an even part of every allocation.
_CHIPLETS = 4


def input_specs(graph: torch.fx.GraphModule) -> tuple[InputSpec, ...]:
    """One spec for each tensor input. An input with a dynamic dimension, which is a layer's KV
    cache, also gets a placement: torch's own shape, cut into equal parts for the chiplets.

    Raises:
        NotImplementedError: for a dynamic input without a constant dimension to cut.
    """
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    # Dynamo's own record of an input; what the graph is called with has concrete shapes.
    values = [(node.name, node.meta.get("example_value")) for node in inputs]
    return tuple(_spec(name, value) for name, value in values if isinstance(value, torch.Tensor))


def _spec(name: str, value: torch.Tensor) -> InputSpec:
    dims = tuple(_dim(size) for size in value.shape)
    placement = None
    if any(not isinstance(dim, int) for dim in dims):
        part = _part(dims)
        placement = PhysicalPlacement(
            shape=dims,
            dtype=str(value.dtype).removeprefix("torch."),
            shards=tuple(ShardPlacement(0, chiplet, part) for chiplet in range(_CHIPLETS)),
        )
    return InputSpec(name, tuple(_hint(size) for size in value.shape), value.dtype, placement)


def _part(dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
    for axis, dim in enumerate(dims):
        if isinstance(dim, int) and dim % _CHIPLETS == 0:
            return (*dims[:axis], dim // _CHIPLETS, *dims[axis + 1 :])
    raise not_modelled(f"a dynamic input of shape {dims}, no dimension a multiple of {_CHIPLETS},")


def _dim(size: int | torch.SymInt) -> Dim:
    if isinstance(size, torch.SymInt) and size.node.maybe_as_int() is None:
        return ("symbol", str(size.node.expr))
    return int(size)


def _hint(size: int | torch.SymInt) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)
