# SPDX-License-Identifier: Apache-2.0
"""Runs a captured graph on the CPU, over the simulated device's own memory."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from lmcache_rbln import simulator

from ..errors import not_modelled
from ..ops.torch_custom_ops.attn import TRITON_OPERATORS


def on_device(value: Any) -> bool:
    """Whether `value` is a tensor in the simulated device's memory."""
    return isinstance(value, torch.Tensor) and value.device.type == "rbln"


class HostViews:
    """CPU tensors over device memory, kept for as long as the device tensors live.

    Weights and caches are arguments of every call, so their views are made once.
    """

    def __init__(self) -> None:
        self._views: Any = WeakIdKeyDictionary()

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The CPU tensor that shares the memory of `tensor`."""
        # An assignment to .data moves a tensor without making a new one.
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        known = self._views.get(tensor)
        if known is None or known[0] != place:
            known = (place, simulator.host_view(tensor))
            self._views[tensor] = known
        view: torch.Tensor = known[1]
        return view


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

    def __init__(self, graph: torch.fx.GraphModule, views: HostViews) -> None:
        super().__init__(graph, garbage_collect_values=True)
        self._host_views = views

    def fetch_attr(self, target: str) -> Any:
        """An attribute of the graph, seen from the host."""
        value = super().fetch_attr(target)
        return self._host_views.of(value) if on_device(value) else value

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
