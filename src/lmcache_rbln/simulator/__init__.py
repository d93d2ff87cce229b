# SPDX-License-Identifier: Apache-2.0
"""A simulated RBLN runtime: torch-rbln's own wheel, with no NPU at hand.

torch-rbln is open source and calls a closed library, ``librbln.so``. This package holds a stand-in
for that library, in C++, compiled on first use. With it ``rbln`` tensors, copies, streams, events
and pinned memory work; device memory lives in host memory, and no operator computes.

From a shell: ``lmcache-rbln simulate -- python program.py``. From Python, before torch is
imported: :func:`activate`. Knows nothing of LMCache.
"""

from lmcache_rbln.simulator._build import build
from lmcache_rbln.simulator._errors import SimulatorError
from lmcache_rbln.simulator._library import (
    activate,
    clear_faults,
    counters,
    environment,
    host_view,
    inject,
    is_active,
    library_path,
    reset_counters,
    set_delay,
    unique_host,
)

__all__ = [
    "SimulatorError",
    "activate",
    "build",
    "clear_faults",
    "counters",
    "environment",
    "host_view",
    "inject",
    "is_active",
    "library_path",
    "reset_counters",
    "set_delay",
    "unique_host",
]
