# SPDX-License-Identifier: Apache-2.0
"""What the demo and the benchmark run on: real NPUs if there are any, else simulated ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from lmcache_rbln import simulator
from lmcache_rbln.npu import SELECTION_VARIABLES

_SIMULATED_NPUS = 2


@dataclass(frozen=True)
class Devices:
    """What the workers run on.

    Attributes:
        name: "NPU" or "simulated NPU".
        why: why it is simulated; "" on an NPU.
        environments: of each worker; two workers with the same one cannot run at a time.
        server_environment: of the server, which opens no NPU.
    """

    name: str
    why: str
    environments: tuple[dict[str, str], dict[str, str]]
    server_environment: dict[str, str]

    @property
    def shared(self) -> bool:
        """Whether both workers need the same NPU, which only one process can hold at a time."""
        return self.environments[0] == self.environments[1]


def find_devices() -> Devices:
    """Real NPUs if there are any, else simulated ones.

    Raises:
        SimulatorError: there is no NPU and the simulated one cannot be built.
        ValueError: there is no NPU and the environment has a setting of the simulated one that
            means nothing.
    """
    base = dict(os.environ)
    seen = _ask_for_npu(base)
    if seen["available"]:
        name, why = "NPU", ""
        if seen["simulated"]:
            name, why = "simulated NPU", "the one that this command was started with"
        return Devices(name, why, worker_environments(base, int(seen["count"])), base)
    # What selects among the NPUs that are not there says nothing of the simulated ones.
    for variable in SELECTION_VARIABLES:
        base.pop(variable, None)
    base = simulator.environment(base, npus=_SIMULATED_NPUS, host=simulator.unique_host())
    environments = worker_environments(base, _SIMULATED_NPUS)
    return Devices("simulated NPU", str(seen["reason"]), environments, base)


def _ask_for_npu(environment: dict[str, str]) -> dict[str, Any]:
    # In a process of its own: where the runtime library is missing, torch cannot be imported.
    code = (
        "import dataclasses, json, sys\n"
        "from lmcache_rbln import npu, simulator\n"
        "seen = dataclasses.asdict(npu.status())\n"
        "seen['simulated'] = seen['available'] and simulator.is_active()\n"
        "print(json.dumps(seen))\n"
    )
    asked = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    try:
        seen: dict[str, Any] = json.loads(asked.stdout.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        reason = f"asking for an NPU ended with exit code {asked.returncode}"
        return {"available": False, "simulated": False, "count": 0, "reason": reason}
    return seen


def worker_environments(base: dict[str, str], count: int) -> tuple[dict[str, str], dict[str, str]]:
    """An NPU for each of two workers, or the same for both where there is only one."""
    joined = "RBLN_NPUS_PER_DEVICE" in base or "RBLN_DEVICE_MAP" in base
    if count < 2 or joined:
        return base, base
    # The narrower of the two selections is narrowed further.
    variable = "RBLN_DEVICES"
    if "RBLN_DEVICES" not in base and "RBLN_VISIBLE_DEVICES" in base:
        variable = "RBLN_VISIBLE_DEVICES"
    chosen = [one.strip() for one in base.get(variable, "").split(",") if one.strip()]
    chosen = chosen or [str(index) for index in range(count)]
    if len(chosen) < 2:
        return base, base
    return {**base, variable: chosen[0]}, {**base, variable: chosen[1]}
