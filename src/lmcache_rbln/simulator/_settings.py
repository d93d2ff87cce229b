# SPDX-License-Identifier: Apache-2.0
"""The settings of the simulated host: environment variables, checked before they are handed on.

The library reads them once, when it is loaded, and refuses the same values; checking them here
gives an exception, or a usage error, instead of a line on stderr and an NPU that cannot be used.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

#: As many NPUs as the stand-in has addresses for.
MAX_NPUS = 64

_FAULT = re.compile(
    r"(h2v|v2h|v2v|malloc|open|sync|borrow|any)@([0-9]{1,18})=(fail|lost|short|wrong|hang=(.+))"
)
_FAULT_FORM = (
    "KIND@N=ACTION;... with KIND one of h2v v2h v2v malloc open sync borrow any, N from 1, "
    "ACTION one of fail lost short wrong hang=SECONDS; short and wrong only for h2v v2h v2v any"
)


def _number(low: float, high: float) -> Callable[[str], str | None]:
    expected = f"a number from {low:g} to {high:g}"

    def check(text: str) -> str | None:
        # What the library takes: no "inf", "1_0", "+5", nor digits of other scripts.
        if re.fullmatch(r"-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?", text) is None:
            return expected
        return None if low <= float(text) <= high else expected

    return check


def _integer(low: int, high: int) -> Callable[[str], str | None]:
    expected = f"an integer from {low} to {high}"

    def check(text: str) -> str | None:
        fits = re.fullmatch("[0-9]{1,20}", text) is not None and low <= int(text) <= high
        return None if fits else expected

    return check


def _flag(text: str) -> str | None:
    return None if text in ("0", "1") else "0 or 1"


def _bulk_limit(text: str) -> str | None:
    match = re.fullmatch("([0-9]{1,7}):([0-9]{1,7})", text)
    fits = match is not None and all(1 <= int(part) <= 1 << 20 for part in match.groups())
    return None if fits else "ENTRIES:MIB, both at least 1, such as 24:12"


def _host(text: str) -> str | None:
    fits = re.fullmatch("[A-Za-z0-9._-]{1,64}", text) is not None
    return None if fits else "up to 64 letters, digits, '.', '_', '-'"


def check_faults(text: str) -> str | None:
    """What is expected where ``text`` is no list of faults, else None."""
    for item in filter(None, text.split(";")):
        match = _FAULT.fullmatch(item)
        if match is None or int(match[2]) == 0:
            return _FAULT_FORM
        if match[3] in ("short", "wrong") and match[1] not in ("h2v", "v2h", "v2v", "any"):
            return _FAULT_FORM
        if match[4] is not None and _number(0, 86400)(match[4]) is not None:
            return "hang=SECONDS with SECONDS from 0 to 86400"
    return None


def _file(text: str) -> str | None:
    # A device is no place for a report, which is read again.
    fits = os.path.isfile(text) or not os.path.exists(text)
    fits = fits and os.access(os.path.dirname(text) or ".", os.W_OK | os.X_OK)
    return None if fits else "a file in a folder that exists and can be written to"


@dataclass(frozen=True)
class Setting:
    """One setting.

    Attributes:
        name: Keyword of ``activate()``; the option of ``lmcache-rbln simulate`` with dashes.
        variable: Environment variable that the library reads.
        metavar: What the help shows as its value.
        help: One line; units and default included.
        check: Gives what is expected where a text is not valid, else None.
    """

    name: str
    variable: str
    metavar: str
    help: str
    check: Callable[[str], str | None]


SETTINGS: tuple[Setting, ...] = (
    Setting("npus", "RBLN_SIM_NPUS", "N", "physical NPUs of the host (1)", _integer(0, MAX_NPUS)),
    Setting(
        "memory_gb",
        "RBLN_SIM_MEMORY_GB",
        "GIB",
        "device memory of each NPU, GiB (16)",
        _number(1 / 1024, 4096),
    ),
    Setting(
        "link_gbps",
        "RBLN_SIM_LINK_GBPS",
        "GBPS",
        "host link, GB/s in each direction; 0 = no modelled cost (0)",
        _number(0, 1e6),
    ),
    Setting(
        "d2d_gbps",
        "RBLN_SIM_D2D_GBPS",
        "GBPS",
        "device-to-device copies, GB/s; 0 = no modelled cost (0)",
        _number(0, 1e6),
    ),
    Setting(
        "submit_us",
        "RBLN_SIM_SUBMIT_US",
        "US",
        "fixed cost of one submission, microseconds (0)",
        _number(0, 1e7),
    ),
    Setting(
        "entry_us",
        "RBLN_SIM_ENTRY_US",
        "US",
        "cost of each entry of a bulk call, microseconds (0)",
        _number(0, 1e7),
    ),
    Setting("copy", "RBLN_SIM_COPY", "0|1", "0: timing only, no bytes are moved (1)", _flag),
    Setting(
        "bulk_limit",
        "RBLN_SIM_BULK_LIMIT",
        "ENTRIES:MIB",
        "above this a bulk host copy times out, as on the device (24:12)",
        _bulk_limit,
    ),
    Setting(
        "exclusive",
        "RBLN_SIM_EXCLUSIVE",
        "0|1",
        "1: an NPU opened by one process can't be opened by another (1)",
        _flag,
    ),
    Setting(
        "delay_us",
        "RBLN_SIM_DELAY_US",
        "US",
        "asynchronous work starts up to this much late, microseconds (0)",
        _number(0, 1e7),
    ),
    Setting(
        "seed",
        "RBLN_SIM_SEED",
        "N",
        "seed of the random delays (0)",
        _integer(0, (1 << 64) - 1),
    ),
    Setting(
        "faults",
        "RBLN_SIM_FAULTS",
        "FAULTS",
        "faults to inject, KIND@N=ACTION;... (none)",
        check_faults,
    ),
    Setting(
        "trace",
        "RBLN_SIM_TRACE",
        "FILE",
        "file that gets one JSON line a submission (none)",
        _file,
    ),
    Setting(
        "host",
        "RBLN_SIM_HOST",
        "NAME",
        "name of the simulated host; processes that name the same one share its NPUs (default)",
        _host,
    ),
)


def variables(values: Mapping[str, object]) -> dict[str, str]:
    """Environment variables for settings given by name.

    Args:
        values: Setting name to value; None leaves a setting alone; booleans become 0 and 1.

    Returns:
        Variable to text, for the settings that are not None.

    Raises:
        TypeError: There is no setting of that name.
        ValueError: A value is not valid; the text names the variable and what is expected.
    """
    known = {setting.name: setting for setting in SETTINGS}
    found = {}
    for name, value in values.items():
        if name not in known:
            raise TypeError(f"no setting {name!r}; there are {', '.join(known)}")
        if value is not None:
            text = str(int(value)) if isinstance(value, bool) else str(value)
            found[known[name].variable] = text
    validate(found)
    return found


def validate(environment: Mapping[str, str]) -> None:
    """Checks every setting found in an environment.

    Raises:
        ValueError: A value is not valid; the text names the variable and what is expected.
    """
    for setting in SETTINGS:
        text = environment.get(setting.variable, "")
        expected = setting.check(text) if text else None
        if expected is not None:
            raise ValueError(f"{setting.variable}={text} is not valid: expected {expected}")
