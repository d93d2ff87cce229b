# SPDX-License-Identifier: Apache-2.0
"""What importing costs, and what the distribution declares."""

from __future__ import annotations

import subprocess
import sys

import importlib_metadata
import pytest
from packaging.requirements import Requirement

import lmcache_rbln


@pytest.mark.parametrize(
    "module", ["lmcache_rbln", "lmcache_rbln.device_spec", "lmcache_rbln.npu", "lmcache_rbln.cli"]
)
def test_import_brings_neither_torch_nor_lmcache(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('torch', 'lmcache') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_both_entry_point_groups_name_the_same_object() -> None:
    values = [
        entry.value
        for group in ("lmcache.device_plugins", "lmcache.device_backends")
        for entry in importlib_metadata.entry_points(group=group, name="rbln")
        if entry.dist.name == "lmcache-rbln"
    ]
    assert values == ["lmcache_rbln.device_spec:RblnDeviceSpec"] * 2


def test_the_vendors_pytorch_is_no_hard_requirement() -> None:
    hard = {
        requirement.name
        for requirement in map(Requirement, importlib_metadata.requires("lmcache-rbln"))
        if not requirement.marker or requirement.marker.evaluate({"extra": ""})
    }
    assert hard == {"importlib-metadata", "lmcache", "numpy", "rich", "wrapt"}


def test_one_version() -> None:
    assert importlib_metadata.version("lmcache-rbln") == lmcache_rbln.__version__
