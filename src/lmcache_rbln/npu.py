# SPDX-License-Identifier: Apache-2.0
"""Is there an NPU, and if not, why not.

Nothing here opens an NPU: torch-rbln's queries only count devices, and an NPU belongs to a process
from its first real use on. So an NPU that another process holds still counts as present.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass

#: Environment variables by which torch-rbln and the RBLN runtime choose NPUs (torch-rbln 0.12.0).
SELECTION_VARIABLES = (
    "RBLN_DEVICES",
    "RBLN_VISIBLE_DEVICES",
    "RBLN_NPUS_PER_DEVICE",
    "RBLN_DEVICE_MAP",
)


@dataclass(frozen=True)
class NpuStatus:
    """What this process sees of the host's NPUs.

    Attributes:
        available: Whether at least one NPU can be selected.
        installed: Whether the package ``torch_rbln`` is installed at all.
        count: Logical devices that torch-rbln offers; 0 unless ``available``.
        reason: Why none is available, in one sentence that says what to do; "" if one is.
    """

    available: bool
    installed: bool
    count: int
    reason: str


def _unavailable(reason: str, *, installed: bool = True) -> NpuStatus:
    return NpuStatus(available=False, installed=installed, count=0, reason=reason)


def status() -> NpuStatus:
    """Ask torch-rbln for NPUs without opening one.

    Imports torch. Never raises: whatever goes wrong is the ``reason``.
    """
    try:
        return _ask()
    except Exception as exc:
        return _unavailable(f"asking torch_rbln for an NPU failed: {type(exc).__name__}: {exc}")


def _ask() -> NpuStatus:
    if importlib.util.find_spec("torch_rbln") is None:
        return _unavailable(
            "no NPU can be used: the package torch_rbln is not installed; install torch-rbln "
            "from the RBLN SDK",
            installed=False,
        )
    try:
        import torch
    except Exception as exc:
        return _unavailable(
            f"no NPU can be used: importing torch failed ({type(exc).__name__}: {exc}); torch loads "
            "torch_rbln, which needs the RBLN runtime library (librbln.so); run lmcache-rbln doctor"
        )
    rbln = getattr(torch, "rbln", None)
    if rbln is None:
        return _unavailable(
            "no NPU can be used: torch_rbln is installed but torch did not load it; unset "
            "TORCH_DEVICE_BACKEND_AUTOLOAD "
            f"(now {os.environ.get('TORCH_DEVICE_BACKEND_AUTOLOAD', 'unset')})"
        )
    # The dummy device keeps tensors on the host: is_available() is True with no NPU behind it.
    if rbln.is_dummy_device():
        return _unavailable(
            "torch_rbln offers only its dummy device, which is not an NPU; unset RBLN_DUMMY_DEVICE "
            f"(now {os.environ.get('RBLN_DUMMY_DEVICE', 'unset')})"
        )
    if not rbln.is_available():
        chosen = [
            f"{name}={os.environ[name]}" for name in SELECTION_VARIABLES if name in os.environ
        ]
        return _unavailable(
            "torch_rbln sees no NPU; check the kernel driver and the device selection "
            f"({', '.join(chosen) or 'no RBLN_* selection is set'})"
        )
    return NpuStatus(available=True, installed=True, count=int(rbln.device_count()), reason="")
