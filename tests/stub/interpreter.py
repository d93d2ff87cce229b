# SPDX-License-Identifier: Apache-2.0
"""A fresh interpreter that imports LMCache on a simulated host of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

from lmcache_rbln import simulator

OURS = "lmcache_rbln._rbln_device_spec.RblnDeviceSpec"

SHOW = """
import lmcache
from lmcache.v1.platform import current_device_spec as spec
print("SPEC", f"{type(spec).__module__}.{type(spec).__qualname__}", lmcache.torch_device_type)
"""


def fresh(code: str, *, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter on the simulated NPU."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        # A host of its own: the NPUs of this process's host may be open here.
        env={**os.environ, "RBLN_SIM_HOST": simulator.unique_host("fresh"), **env},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert not check or done.returncode == 0, done.stderr
    return done


def run(code: str, *, check: bool = True, **env: str) -> tuple[str, str]:
    """Likewise; returns the SPEC line and stderr."""
    done = fresh(code, check=check, **env)
    line = next((line for line in done.stdout.splitlines() if line.startswith("SPEC ")), "")
    return line.removeprefix("SPEC "), done.stderr
