# SPDX-License-Identifier: Apache-2.0
"""What warm-up learns about each compiled graph, above all the KV cache's share of memory."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# A dimension of a placement: a constant, or the name of a dynamic one.
Dim = int | tuple[str, str]


@dataclass(frozen=True)
class ShardPlacement:
    """One piece of a tensor, on one chiplet of one NPU."""

    node_id: int
    chiplet_id: int
    slice_shape: tuple[Dim, ...]


@dataclass(frozen=True)
class PhysicalPlacement:
    """How the device holds a tensor: shape, element type (e.g. "float16"), and its pieces."""

    shape: tuple[Dim, ...]
    dtype: str
    shards: tuple[ShardPlacement, ...]


@dataclass(frozen=True)
class InputSpec:
    """One input of a program; `physical_placement` is set for a dynamic shape only."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    physical_placement: PhysicalPlacement | None = None


@dataclass(frozen=True)
class OutputSpec:
    """One output of a program."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    physical_placement: PhysicalPlacement | None = None


@dataclass(frozen=True)
class CompiledProgram:
    """One graph, the device it runs on, and what runs it."""

    name: str
    device: Any
    runtime: Any
    input_specs: tuple[InputSpec, ...] = ()
    output_specs: tuple[OutputSpec, ...] = ()


class _Scopes(threading.local):
    def __init__(self) -> None:
        self.open: list[list[CompiledProgram]] = []


_scopes = _Scopes()


@contextlib.contextmanager
def capture_programs() -> Iterator[list[CompiledProgram]]:
    """Collect every program that this thread compiles within the scope."""
    programs: list[CompiledProgram] = []
    _scopes.open.append(programs)
    try:
        yield programs
    finally:
        # By identity: two scopes that saw the same programs compare equal.
        _scopes.open = [scope for scope in _scopes.open if scope is not programs]


def record(program: CompiledProgram) -> None:
    """Add `program` to each open scope of this thread."""
    for scope in _scopes.open:
        scope.append(program)
