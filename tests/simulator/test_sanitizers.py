# SPDX-License-Identifier: Apache-2.0
"""The runtime's sources under the compiler's sanitizers, worked hard by eight threads."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from lmcache_rbln import simulator
from lmcache_rbln.simulator import _build

STRESS = Path(__file__).with_name("stress.cpp")


@pytest.mark.parametrize("sanitizer", ["address", "undefined", "thread"])
@pytest.mark.parametrize("delay_us", [0, 300])
def test_stress(sanitizer, delay_us):
    flags = ["-std=c++17", "-O1", "-g", "-pthread", f"-I{_build.SOURCES}"]
    flags += [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
    try:
        program = _build.compile_once(
            flags, [*sorted(_build.SOURCES.glob("*.cpp")), STRESS], f"stress-{sanitizer}"
        )
    except simulator.SimulatorError as error:
        if "cannot find" in str(error):  # the linker, of the sanitizer's library
            pytest.skip(f"the compiler has no {sanitizer} sanitizer")
        raise
    settings = {"RBLN_SIM_NPUS": "2", "RBLN_SIM_HOST": simulator.unique_host()}
    result = subprocess.run(
        [program, "100"],
        env={**settings, "RBLN_SIM_DELAY_US": str(delay_us), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )
    reports = [line for line in result.stderr.splitlines() if not line.startswith("rbln-sim[")]
    assert reports == []
    assert (result.stdout, result.returncode) == ("0 mistakes\n", 0)
