# SPDX-License-Identifier: Apache-2.0
"""The stand-in defines every symbol that torch-rbln needs of its runtime."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lmcache_rbln import simulator


def symbols(path: Path, option: str) -> set[str]:
    """Dynamic symbols of a shared object, without their version; not those it can do without."""
    listing = subprocess.run(
        ["nm", "-D", option, str(path)], capture_output=True, text=True, check=True
    ).stdout
    lines = [line.split() for line in listing.splitlines() if line.strip()]
    return {fields[-1].split("@")[0] for fields in lines if fields[-2] != "w"}


def package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def extensions() -> list[Path]:
    return sorted(package_folder("torch_rbln").rglob("*.so"))


@functools.cache
def needed() -> frozenset[str]:
    """What torch-rbln's shared objects leave undefined and nothing else in this process defines."""
    import torch  # loads torch-rbln and all it needs

    assert torch.rbln.is_available()
    wanted = set().union(*(symbols(path, "--undefined-only") for path in extensions()))
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    objects = {path for path in mapped if ".so" in Path(path).name} | {
        os.path.realpath(sys.executable)
    }
    for path in objects:
        if Path(path).name != "librbln.so":
            wanted -= symbols(Path(path), "--defined-only")
    return frozenset(wanted)


def test_needed_symbols_are_defined():
    missing = needed() - symbols(simulator.library_path(), "--defined-only")
    assert not missing, f"the simulated runtime lacks {sorted(missing)}"


def test_a_missing_symbol_is_named():
    """The comparison would notice: a library that is no RBLN runtime lacks all of them."""
    assert {"rbln_get_device_count", "_ZN4rbln9rbln_freeEm"} <= needed()
    assert len(needed()) > 80
    python = Path(os.path.realpath(sys.executable))
    assert needed() - symbols(python, "--defined-only") == needed()


def test_every_symbol_is_bound_at_load(script):
    # LD_BIND_NOW resolves all functions when torch-rbln's libraries are loaded.
    script("import torch; assert torch.rbln.is_available()", variables={"LD_BIND_NOW": "1"})


def test_the_abi_window_holds_what_torch_rbln_was_built_against(runtime):
    from torch_rbln._internal.abi_check import VERDICT_OK, check_librbln_abi, get_built_abi

    low, high = runtime.library.rbln_abi_min_supported(), runtime.library.rbln_abi_current()
    assert (low, high) == (6, 6) == (get_built_abi(), get_built_abi())
    assert check_librbln_abi(os.fspath(simulator.library_path())) == VERDICT_OK


@pytest.mark.parametrize("name", ["rbln_rt_run", "rbln_rt_prepare_inputs"])
def test_what_is_not_modelled_refuses(runtime, capfd, name):
    assert getattr(runtime.library, name)() != 0
    assert f"{name}: not part of the simulated runtime" in capfd.readouterr().err
