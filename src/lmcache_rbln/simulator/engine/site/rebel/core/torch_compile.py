# SPDX-License-Identifier: Apache-2.0
"""The `rbln` backend of torch.compile. Importing this module registers it."""

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo import list_backends, register_backend
from torch.utils import _pytree as pytree

from ..errors import not_modelled
from ..ops import torch_custom_ops  # noqa: F401  # defines the operators
from . import program_capture
from .graph_runner import GraphRunner, host_view, on_device
from .placement import input_specs

# torch-rbln adds "rbln", which torch's own annotations don't know.
_torch: Any = torch

_numbers = itertools.count(1)

# Options that change nothing here: where artifacts go, which NPUs share a graph, how it is traced.
_IGNORED_OPTIONS = frozenset(
    {
        "cache_dir",
        "compile_context",
        "disable_logger",
        "global_device_id",
        "guard_filter_fn",
        "mega_cache_only",
        "model_trace_method",
        "num_devices",
        "process_group_dict",
        "tensor_parallel_size",
        "use_global_ctx",
        "use_weight_sharing",
    }
)
_OPTIONS = _IGNORED_OPTIONS | {"mode", "use_static_output", "_runtime_holder"}


@dataclass
class _InputBinding:
    """Weak references to the tensors of the last run, in graph order.

    torch-rbln reads them to learn the order of a graph's inputs.
    """

    validated: list[Any] = field(default_factory=list)


class Runtime:
    """What a compiled program is here: the graph, and its arguments' way to the CPU and back."""

    def __init__(self, graph: torch.fx.GraphModule, use_static_output: bool) -> None:
        self._graph = graph
        self._runner = GraphRunner(graph)
        self._input_binding = _InputBinding()
        # With static outputs a launch overwrites what the one before it returned.
        self._static: dict[int, torch.Tensor] | None = {} if use_static_output else None

    def reset_adaptive_buffers(self) -> None:
        """Forget buffers that were sized for an earlier cache."""
        if self._static is not None:
            self._static = {}

    def run(self, *args: Any, out: list[torch.Tensor] | None = None) -> tuple[Any, ...]:
        """Launch with `args` in graph order, into `out` if given; returns the outputs."""
        results = tuple(self(*args))
        if out is None:
            return results
        for target, result in zip(out, results, strict=True):
            target.copy_(result)
        return tuple(out)

    def __call__(self, *args: Any) -> Any:
        """Launch with `args` in graph order; returns what the graph returns."""
        self._input_binding.validated = [
            weakref.ref(a) if isinstance(a, torch.Tensor) else None for a in args
        ]
        device = self._device(args)
        if device is not None:
            # A launch comes after what is queued on the stream; the CPU has to wait for that.
            _torch.rbln.current_stream(device).synchronize()
        # Graphs write into their arguments, which tensors made in inference mode don't allow.
        with torch.inference_mode(False), torch.no_grad():
            host = [host_view(a) for a in args]
            given = {id(h): a for h, a in zip(host, args, strict=True) if on_device(a)}
            leaves, tree = pytree.tree_flatten(self._runner.run(*host))
            back = [self._to_device(n, x, device, given) for n, x in enumerate(leaves)]
        return pytree.tree_unflatten(back, tree)

    def _to_device(
        self, number: int, value: Any, device: torch.device | None, given: dict[int, Any]
    ) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in given:
            return given[id(value)]
        if device is None:
            return value
        if self._static is None:
            return value.contiguous().to(device)
        target = self._static.get(number)
        if target is None or (target.shape, target.dtype) != (value.shape, value.dtype):
            target = torch.empty(value.shape, dtype=value.dtype, device=device)
            self._static[number] = target
        target.copy_(value)
        return target

    def _device(self, args: Sequence[Any]) -> torch.device | None:
        tensors = itertools.chain(args, self._graph.parameters(), self._graph.buffers())
        return next((t.device for t in tensors if on_device(t)), None)


def rbln_backend(graph: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Compile a captured graph, that is, wrap it to run on the CPU.

    Raises:
        NotImplementedError: for an option that would change the result and has no model.
    """
    options = dict(kwargs.get("options") or {})
    modes = options.get("mode") or []
    unknown = sorted(set(options) - _OPTIONS)
    if unknown:
        raise not_modelled(f"compile option {unknown[0]}={options[unknown[0]]!r}")
    if set([modes] if isinstance(modes, str) else modes) - {"strict"}:
        raise not_modelled(f"compile option mode={modes!r}")
    runtime = Runtime(graph, bool(options.get("use_static_output")))
    holder = options.get("_runtime_holder")
    if holder is not None:
        holder.append(runtime)
    program_capture.record(
        program_capture.CompiledProgram(
            name=f"simulated/{next(_numbers)}",
            device=None,
            runtime=runtime,
            input_specs=input_specs(graph),
        )
    )
    return _torch._dynamo.disable(runtime)


if "rbln" not in list_backends():
    register_backend(name="rbln", compiler_fn=rbln_backend)
