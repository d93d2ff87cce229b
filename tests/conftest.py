# SPDX-License-Identifier: Apache-2.0
"""Every test but the hardware ones runs on the simulated NPU; here it is put in place."""

from __future__ import annotations

import os

import hypothesis
import pytest

#: Simulated NPUs that each test process has for itself.
NPUS = 2

hypothesis.settings.register_profile("default", deadline=None, print_blob=True)
hypothesis.settings.load_profile("default")


def pytest_configure(config: pytest.Config) -> None:
    """Load the simulated runtime before anything imports torch, which loads torch-rbln."""
    if config.option.markexpr == "hardware":
        return  # These must see the real runtime, or none.
    os.environ["LMCACHE_TRACK_USAGE"] = "false"
    # A host of its own for each process: an NPU that one process has opened is closed to others.
    os.environ["RBLN_SIM_HOST"] = f"pytest-{os.getpid()}"
    from lmcache_rbln import simulator

    simulator.activate(npus=NPUS)
