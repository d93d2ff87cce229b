# SPDX-License-Identifier: Apache-2.0
"""Stand-in for the vendor's closed compiler package of the same name.

A captured graph runs on the CPU, directly over the memory of the simulated NPU. What vLLM-RBLN
0.12.0 and torch-rbln 0.12.0 import from the package is here; anything else is absent, and an
operator or option without a model raises `NotImplementedError` ("... not modelled").

Only `lmcache-rbln simulate --engine` puts this package on the import path.
"""

import importlib
from typing import Any

from . import flags, profiler
from .compile_context import CompileContext
from .device_info import get_npu_name
from .errors import not_modelled

__all__ = ["CompileContext", "compile", "flags", "get_npu_name", "manual_seed", "profiler"]

# vLLM-RBLN compares major.minor with its own; the local part says what this is.
__version__ = "0.12.0+simulated"

# torch-heavy parts load on demand: `import torch` loads torch_rbln, which may look into this
# package while torch itself is half imported.
_ON_DEMAND = ("core", "host_memory", "kv_cache", "ops", "triton")


def compile(model: Any = None, *args: Any, dtype: str = "", **kwargs: Any) -> Any:
    """Ahead-of-time compilation, which vLLM-RBLN does not use.

    vLLM-RBLN reads the signature to learn whether `dtype` is an option.

    Raises:
        NotImplementedError: always.
    """
    raise not_modelled("ahead-of-time rebel.compile()")


def manual_seed(seed: int) -> None:
    """Seed the generator that the sampling operators draw from."""
    from .ops import sampling

    sampling.seed(seed)


def __getattr__(name: str) -> Any:
    if name in _ON_DEMAND:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"the simulated rebel package has no {name!r}")
