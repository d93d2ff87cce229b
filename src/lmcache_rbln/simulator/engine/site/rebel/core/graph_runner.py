# SPDX-License-Identifier: Apache-2.0
"""Runs a captured graph on the CPU, over the simulated device's own memory."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from lmcache_rbln import simulator

from ..errors import not_modelled
from ..ops.torch_custom_ops.attn import TRITON_OPERATORS


def on_device(value: Any) -> bool:
    """Whether `value` is a tensor in the simulated device's memory."""
    return isinstance(value, torch.Tensor) and value.device.type == "rbln"


def host_view(value: Any) -> Any:
    """`value`, or the CPU tensor on its memory if it is a device tensor."""
    return simulator.host_view(value) if on_device(value) else value


def _to_host(value: Any) -> Any:
    """A device argument of a node, e.g. torch.zeros(..., device="rbln"), as the CPU."""
    if isinstance(value, torch.device) and value.type == "rbln":
        return torch.device("cpu")
    if isinstance(value, str) and value.partition(":")[0] == "rbln":
        return "cpu"
    return value


def _operator_name(target: Any) -> str:
    """`namespace::name` of a torch operator, with or without its overload."""
    if isinstance(target, torch._ops.OpOverload):
        target = target.overloadpacket
    if isinstance(target, torch._ops.OpOverloadPacket):
        return str(target._qualified_op_name)
    return ""


class GraphRunner(torch.fx.Interpreter):
    """Interprets a graph whose arguments and attributes may be device tensors."""

    def fetch_attr(self, target: str) -> Any:
        """An attribute of the graph, seen from the host."""
        return host_view(super().fetch_attr(target))

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Raises: NotImplementedError, always: torch hands weights over as arguments."""
        raise not_modelled(f"a graph that calls the submodule {target!r}")

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A function of a node, on the CPU."""
        args, kwargs = pytree.tree_map(_to_host, (args, kwargs))
        name = _operator_name(target)
        if name.startswith("rbln_triton_ops::"):
            model: Callable[..., torch.Tensor] | None = TRITON_OPERATORS.get(name)
            if model is None:
                raise not_modelled(f"operator {name}")
            return model(*args, **kwargs)
        return super().call_function(target, args, kwargs)

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A tensor method of a node, on the CPU."""
        args, kwargs = pytree.tree_map(_to_host, (args, kwargs))
        return super().call_method(target, args, kwargs)
