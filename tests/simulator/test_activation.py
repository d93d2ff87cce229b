# SPDX-License-Identifier: Apache-2.0
"""The stand-in gets into a process, or it is said why it can't."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lmcache_rbln import simulator
from lmcache_rbln.simulator import _build


def test_active_here():
    assert simulator.is_active()
    simulator.activate()  # as often as one likes, with the settings that hold
    simulator.activate(npus=int(os.environ["RBLN_SIM_NPUS"]))


def test_settings_that_come_too_late():
    with pytest.raises(simulator.SimulatorError, match=r"RBLN_SIM_NPUS=5 would come too late"):
        simulator.activate(npus=5)
    assert os.environ["RBLN_SIM_NPUS"] != "5"


@pytest.fixture
def plain():
    """Run a script in a process that has no runtime, simulated or real."""

    def run(text: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("RBLN_") and name != "LD_LIBRARY_PATH"
        }
        return subprocess.run(
            [sys.executable, "-c", text],
            env={**environment, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **variables},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_torch_was_imported_before(plain):
    result = plain(
        "import torch; from lmcache_rbln import simulator\n"
        "assert not simulator.is_active()\n"
        "simulator.activate()"
    )
    assert "torch was imported before the simulated NPU was activated" in result.stderr


def test_not_in_use(plain):
    for call in ("counters()", "reset_counters()", "inject('h2v@1=fail')", "clear_faults()"):
        result = plain(f"from lmcache_rbln import simulator; simulator.{call}")
        assert "the simulated NPU is not in use in this process" in result.stderr


def test_another_runtime(plain, tmp_path):
    source = tmp_path / "real.cpp"
    source.write_text('extern "C" int rbln_runtime_available() { return 1; }')
    library = _build.compile_once(
        ["-shared", "-fPIC", "-Wl,-soname,librbln.so"], [source], "librbln.so"
    )
    result = plain(
        f"import ctypes; ctypes.CDLL({str(library)!r})\n"
        "from lmcache_rbln import simulator\n"
        "assert not simulator.is_active()\n"
        "simulator.activate()"
    )
    assert f"another RBLN runtime is loaded already ({library})" in result.stderr


def test_a_bad_setting_changes_nothing(plain):
    result = plain(
        "import os; from lmcache_rbln import simulator\n"
        "before = dict(os.environ)\n"
        "try: simulator.activate(npus=2, link_gbps='fast')\n"
        "except ValueError as error: print(error)\n"
        "assert dict(os.environ) == before and not simulator.is_active()"
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("RBLN_SIM_LINK_GBPS=fast is not valid: expected a number")


def test_importing_the_simulator_imports_no_torch(plain):
    result = plain("import sys, lmcache_rbln.simulator; assert 'torch' not in sys.modules")
    assert result.returncode == 0, result.stderr


def test_environments(tmp_path):
    base = {"LD_LIBRARY_PATH": "/usr/lib/somewhere", "HOME": "/root"}
    made = simulator.environment(base, npus=3, exclusive=False)
    assert base == {"LD_LIBRARY_PATH": "/usr/lib/somewhere", "HOME": "/root"}
    folder = str(simulator.library_path().parent)
    assert made == {
        "HOME": "/root",
        "LD_LIBRARY_PATH": f"{folder}:/usr/lib/somewhere",
        "RBLN_SIM_NPUS": "3",
        "RBLN_SIM_EXCLUSIVE": "0",
    }
    # Doing it again adds nothing.
    assert simulator.environment(made) == made
