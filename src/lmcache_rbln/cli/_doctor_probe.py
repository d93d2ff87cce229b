# SPDX-License-Identifier: Apache-2.0
"""The doctor's look at torch, the RBLN runtime and LMCache, in a process of its own.

A broken runtime library can make ``import torch`` fail, hang or crash. So this runs as
``python -m lmcache_rbln.cli._doctor_probe [--open] [--server URL [--mode]]`` with torch's autoload
off, loads one thing after the other, and prints one JSON line before and one after each: when the
process ends early, the last line says where.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import traceback
from collections.abc import Callable
from typing import IO, Any

#: Seconds for a server that accepts connections to answer one request.
_ANSWER_SECONDS = 5.0


def main() -> None:
    """Run all stages; a failing one does not keep the later ones from trying."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--open", action="store_true")
    parser.add_argument("--server", default="")
    parser.add_argument("--mode", action="store_true")
    args = parser.parse_args()
    # Everything that the imported packages print goes to stderr; the report has its own descriptor.
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _run(report, "torch", _torch)
    _run(report, "runtime", _runtime)
    _run(report, "npu", _npu)
    _run(report, "lmcache", _lmcache)
    if args.server:
        _run(report, "server", lambda: _server(args.server, args.mode))
    if args.open:
        # The last one: after an NPU that could not be opened, torch-rbln 0.12.0 counts none.
        _run(report, "open", _open)
    report.flush()
    # Nothing is left to do, and a broken runtime's teardown must not spoil the exit code.
    os._exit(0)


def _run(report: IO[str], stage: str, look: Callable[[], dict[str, Any]]) -> None:
    print(json.dumps({"begin": stage}), file=report, flush=True)
    try:
        facts = look()
    except BaseException as exc:
        traceback.print_exc()
        facts = {"error": f"{type(exc).__name__}: {exc}"}
    print(json.dumps({"end": stage, "facts": facts}), file=report, flush=True)


def _torch() -> dict[str, Any]:
    import torch

    # Only torch's own import was to go without it; npu.status() reports what is set.
    os.environ.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    return {"version": torch.__version__, "file": torch.__file__}


def _runtime() -> dict[str, Any]:
    """Load torch-rbln as torch's autoload would, and read what the runtime says of its ABI."""
    facts: dict[str, Any] = {}
    try:
        import torch_rbln

        torch_rbln.torch_backends_entry_point()
    except BaseException as exc:
        facts["error"] = f"{type(exc).__name__}: {exc}"
        # Lets its modules be imported though its runtime cannot be loaded.
        os.environ["TORCH_RBLN_DIAGNOSE"] = "1"
    with contextlib.suppress(Exception):  # private names of torch-rbln 0.12.0: nice to have
        from torch_rbln._internal import abi_check, rbln_runtime_lib

        candidates = [path for path, _ in rbln_runtime_lib.runtime_library_candidates()]
        facts["searched"] = candidates
        facts["path"] = next(filter(os.path.isfile, candidates), "")
        facts["built_abi"] = abi_check.get_built_abi()
        facts["mapped"] = rbln_runtime_lib.loaded_runtime_libraries()
        handle = abi_check.open_mapped_runtime(facts["mapped"][0])
        facts["abi"] = abi_check.read_runtime_abi(handle)
    from lmcache_rbln import simulator

    facts["simulated"] = simulator.is_active()
    return facts


def _npu() -> dict[str, Any]:
    import dataclasses

    import torch

    from lmcache_rbln import npu

    facts: dict[str, Any] = dataclasses.asdict(npu.status())
    if facts["available"]:
        facts["physical"] = torch.rbln.physical_device_count()  # type: ignore[attr-defined]
    return facts


def _open() -> dict[str, Any]:
    """Use each logical device once, which makes it this process's."""
    import torch

    rbln: Any = torch.rbln  # type: ignore[attr-defined]
    opened: list[str] = []
    errors: list[str] = []
    for index in range(rbln.device_count()):
        try:
            torch.empty(1, device=f"rbln:{index}")
            rbln.synchronize(index)
            opened.append(f"rbln:{index}")
        except Exception as exc:
            errors.append(f"rbln:{index}: {exc}")
    return {"opened": opened, "errors": errors}


def _lmcache() -> dict[str, Any]:
    import importlib

    import lmcache

    # The table of detectors: importing it is what installs ours.
    importlib.import_module("lmcache.v1.gpu_connector.kv_format.detectors.registry")
    from lmcache_rbln.lmcache_compat import blocks_first, selected, takeover

    return {
        "spec": selected.name(),
        "backend": selected.spec().backend_name,
        "device": lmcache.torch_device_type,
        "taken_over": takeover.taken_over(),
        "blocks_first": blocks_first.is_installed() or blocks_first.is_native(),
    }


def _server(url: str, ask_mode: bool) -> dict[str, Any]:
    """Ask the server what it says without its HTTP pages."""
    from lmcache_rbln.lmcache_compat.worker import WorkerClient

    with WorkerClient(url, model_name="lmcache-rbln-doctor", timeout=_ANSWER_SECONDS) as client:
        facts: dict[str, Any] = {"chunk_size": client.chunk_size}
        if not ask_mode:
            return facts
        return {**facts, "engine_driven": client.serves_engine_driven()}


if __name__ == "__main__":
    main()
