# SPDX-License-Identifier: Apache-2.0
"""The doctor's checks of this host: what is installed, what the environment says, the NPUs.

Metadata of distributions and the probe's facts (``_doctor_probe``) only: torch is not imported.
"""

from __future__ import annotations

import ast
import datetime
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import importlib_metadata

from lmcache_rbln import host_memory, npu
from lmcache_rbln.cli import _npu_holders
from lmcache_rbln.cli._doctor_report import Check, failed, ok, warning
from lmcache_rbln.integration.vllm import settings
from lmcache_rbln.lmcache_compat import versions

#: What the probe found, by stage; a stage that it did not reach is missing.
Facts = Mapping[str, Mapping[str, Any]]

#: What this release is written for; pyproject.toml's extras say the same.
TORCH_RBLN_SERIES = "0.12."
VLLM_RBLN_SERIES = "0.12."
VLLM_SERIES = "0.30."

CONNECTOR = "RBLNLMCacheConnectorV1"
_CONNECTOR_MODULE = "lmcache_rbln.integration.vllm.connector"

OUR_SPEC = "lmcache_rbln._rbln_device_spec.RblnDeviceSpec"
_GROUPS = ("lmcache.device_plugins", "lmcache.device_backends")


def _matches(pattern: str) -> Callable[[str], object]:
    return re.compile(pattern).fullmatch


#: The package's own settings: whether a value is one, and what they take; docs/settings.md explains them.
SETTINGS: dict[str, tuple[Callable[[str], object], str]] = {
    "LMCACHE_RBLN_CACHE": (_matches(".+"), "a folder"),
    "LMCACHE_RBLN_DEVICE_STAGING_MB": (_matches("[0-9]{1,6}"), "whole MiB, 0 for none"),
    "LMCACHE_RBLN_GUARD": (_matches("[01]"), "0 or 1"),
    "LMCACHE_RBLN_KV_LAYOUT": (
        _matches("(?i:blocks_first|kv_first)"),
        "blocks_first or kv_first",
    ),
    "LMCACHE_RBLN_PREFAULT": (_matches("[01]"), "0 or 1"),
    "LMCACHE_RBLN_SELF_CHECK": (_matches("[01]"), "0 or 1"),
    "LMCACHE_RBLN_SERVER": (settings.is_address, "tcp://HOST:PORT"),
    "LMCACHE_RBLN_STAGING_MB": (_matches("(?=.*[1-9])[0-9]{1,6}"), "whole MiB, 1 or more"),
}

_SIMULATE = "to try things without an NPU: lmcache-rbln simulate -- COMMAND"


def software(facts: Facts, *, engine: bool) -> Iterator[Check]:
    """Every check that needs no server, in the order of the report."""
    yield _python()
    yield _torch(facts)
    yield _torch_rbln()
    yield _runtime(facts)
    yield _visible(facts)
    yield _held(facts)
    yield _selection(os.environ)
    yield _lmcache()
    yield _providers()
    yield _backend(facts)
    yield _blocks_first(facts)
    yield _settings(os.environ)
    if engine:
        yield _engine()
        yield _connector()


def installed(name: str) -> str:
    """The installed version of a distribution; "" if it is not installed."""
    try:
        return str(importlib_metadata.version(name))
    except importlib_metadata.PackageNotFoundError:
        return ""


def _python() -> Check:
    found = sys.version.split()[0]
    if (3, 10) <= sys.version_info < (3, 14):
        return ok("Python", f"{found} ({sys.executable})")
    return failed(
        "Python", f"{found} ({sys.executable})", "make the environment with Python 3.10 to 3.13"
    )


# -- torch and the RBLN software ---------------------------------------------------------------


def _pin() -> str:
    """The torch build that the installed torch-rbln asks for, as ``2.13.0+cpu``; "" if unknown."""
    try:
        requirements = importlib_metadata.requires("torch-rbln") or []
    except importlib_metadata.PackageNotFoundError:
        return ""
    for requirement in requirements:
        match = re.match(r"torch\s*\(?==\s*([^\s;,)]+)", requirement)
        if match:
            return match[1]
    return ""


def _torch(facts: Facts) -> Check:
    found, pin = installed("torch"), _pin()
    reinstall = (
        f"pip install torch=={pin or '2.13.0+cpu'} (if pip finds no such build: --extra-index-url "
        "with PyTorch's index of CPU builds, which its installation page names)"
    )
    if not found:
        return failed("torch", "not installed", f"{reinstall}; then pip install torch-rbln")
    if pin and found != pin:
        return failed(
            "torch",
            f"{found}; torch-rbln {installed('torch-rbln')} needs {pin}{_replaced_by(pin)}",
            f"pip uninstall torch, then {reinstall}",
        )
    error = facts.get("torch", {}).get("error")
    if error:
        return failed(
            "torch",
            f"{found} cannot be imported: {error}",
            f"pip uninstall torch, then {reinstall}",
        )
    return ok("torch", found + (", the build that torch-rbln asks for" if pin else ""))


def _replaced_by(pin: str) -> str:
    """Which installed distributions ask for another torch than the vendor's, and since when."""
    torch = importlib_metadata.distribution("torch")
    asking = []
    for dist in importlib_metadata.distributions():
        for requirement in dist.requires or []:
            match = re.match(r"torch\s*\(?==\s*([^\s;,)]+)", requirement)
            if (
                match
                and "extra ==" not in requirement
                and match[1] not in (pin, pin.partition("+")[0])
            ):
                asking.append(f"{dist.name} {dist.version} (torch=={match[1]})")
    text = ""
    folder = getattr(torch, "_path", None)
    if isinstance(folder, Path) and folder.exists():
        when = datetime.datetime.fromtimestamp(folder.stat().st_mtime)
        text = f"; put there {when:%Y-%m-%d %H:%M} by {(torch.read_text('INSTALLER') or 'an unknown installer').strip()}"
    return text + (f", as asked for by {', '.join(sorted(set(asking)))}" if asking else "")


def _torch_rbln() -> Check:
    found = installed("torch-rbln")
    if not found:
        return failed(
            "torch-rbln",
            "not installed",
            f"pip install 'torch-rbln>=0.12,<0.13' from the RBLN SDK; {_SIMULATE}",
        )
    pin = f", asks for torch {_pin()}" if _pin() else ""
    if not found.startswith(TORCH_RBLN_SERIES):
        return warning(
            "torch-rbln",
            f"{found}{pin}; tested with 0.12",
            "pip install 'torch-rbln>=0.12,<0.13', or a newer lmcache-rbln",
        )
    return ok("torch-rbln", f"{found}{pin}")


def _runtime(facts: Facts) -> Check:
    name = "RBLN runtime"
    if not installed("torch-rbln"):
        return failed(
            name, "not looked at: torch-rbln is not installed", "mend the line above first"
        )
    runtime = facts.get("runtime")
    if runtime is None:
        return failed(
            name,
            "not reached: the process that loads it ended before",
            "mend torch first, then run lmcache-rbln doctor again",
        )
    path = (runtime.get("mapped") or [runtime.get("path") or ""])[0]
    compiler = installed("rebel-compiler")
    about = ", ".join(
        part
        for part in (
            "the simulated one" if runtime.get("simulated") else "",
            path,
            f"rebel-compiler {compiler}" if compiler else "",
            _abi(runtime),
        )
        if part
    )
    error = str(runtime.get("error", ""))
    if not error:
        return ok(name, about)
    if "ABI mismatch" in error:
        return failed(
            name,
            f"{about}: they do not fit",
            "install the rebel-compiler that belongs to this torch-rbln (pip install "
            "'torch-rbln[runtime]' with the vendor's index), or the torch-rbln that belongs to it",
        )
    if runtime.get("path") == "" or "Could not find librbln.so" in error:
        return failed(
            name,
            "librbln.so is not found"
            + (f" (searched: {', '.join(runtime['searched'])})" if runtime.get("searched") else ""),
            "install rebel-compiler from the vendor's index, or put the folder of librbln.so on "
            f"LD_LIBRARY_PATH; {_SIMULATE}",
        )
    return failed(
        name,
        f"{about or 'librbln.so'}: loading it failed: {' '.join(error.split())}",
        "TORCH_RBLN_DIAGNOSE=1 python -m torch_rbln.diagnose",
    )


def _abi(runtime: Mapping[str, Any]) -> str:
    if not runtime.get("abi"):
        return ""
    low, current = runtime["abi"]
    built = runtime.get("built_abi")
    return f"ABI {low} to {current}" + (f", torch-rbln was built for {built}" if built else "")


def _visible(facts: Facts) -> Check:
    name = "NPUs"
    seen = facts.get("npu", {})
    simulated = "simulated " if facts.get("runtime", {}).get("simulated") else ""
    if seen.get("available"):
        physical = seen.get("physical", seen["count"])
        joined = f", as {seen['count']} torch devices" if physical != seen["count"] else ""
        return ok(name, f"{physical} {simulated}visible{joined}")
    nodes = _npu_holders.device_nodes()
    found = "none visible"
    if nodes:
        found += f", though the driver shows {', '.join(f'/dev/rbln{number}' for number in nodes)}"
    if facts.get("runtime", {}).get("error") or not seen:
        return failed(name, found, "mend the line above first")
    if os.environ.get("RBLN_DUMMY_DEVICE"):
        return failed(
            name, f"{found}: torch-rbln offers its dummy device", "unset RBLN_DUMMY_DEVICE"
        )
    chosen = [f"{key}={os.environ[key]}" for key in npu.SELECTION_VARIABLES if os.environ.get(key)]
    if chosen:
        return failed(
            name,
            f"{found} with {', '.join(chosen)}",
            f"unset {', '.join(text.split('=')[0] for text in chosen)}, or name NPUs that exist "
            "(rbln-smi lists them)",
        )
    return failed(
        name,
        found,
        "load the RBLN kernel driver (rbln-smi must list NPUs); in a container, pass the devices "
        f"in (--device rebellions.ai/npu=all, or --device /dev/rbln0); {_SIMULATE}",
    )


def _held(facts: Facts) -> Check:
    name = "NPUs in use"
    seen, opened = facts.get("npu", {}), facts.get("open")
    if not seen.get("available"):
        return ok(name, "not looked at: no NPU is visible")
    if facts["runtime"].get("simulated"):
        present = int(os.environ.get("RBLN_SIM_NPUS") or 1)
        holders = _npu_holders.of_simulated(present)
        numbers = list(range(present))
    else:
        holders = _npu_holders.of_nodes()
        numbers = _npu_holders.device_nodes()
    mine = chosen_npus(os.environ, numbers)
    taken = {holder.npu for holder in holders}
    free = [str(index) for index, number in enumerate(numbers) if number not in taken]
    holders = [holder for holder in holders if holder.npu in mine]
    who = f"held: {', '.join(map(str, holders))}" if holders else ""
    # torch-rbln 0.12.0 takes all NPUs that it sees at its first use of any.
    choose = (
        "end " + " and ".join(f"process {pid}" for pid in sorted({h.pid for h in holders}))
        if holders
        else "end the process that holds it (rbln-smi lists it)"
    )
    choose += f", or use what is free: RBLN_DEVICES={','.join(free)}" if holders and free else ""
    if opened is not None:
        errors = opened.get("errors", []) + [opened[key] for key in ("error",) if key in opened]
        if errors:
            text = " ".join("; ".join(errors).split())[:300]
            return failed(name, f"{who}{who and '; '}opening failed: {text}", choose)
        return ok(name, f"opened {', '.join(opened['opened'])} and gave them back")
    if holders:
        return failed(name, who, choose)
    return ok(name, "held by no process that this user may see (--open tries for real)")


def chosen_npus(environment: Mapping[str, str], present: list[int]) -> list[int]:
    """Which of the NPUs present this environment selects: ``RBLN_DEVICES`` counts those present."""
    text = environment.get("RBLN_DEVICES") or environment.get("RBLN_VISIBLE_DEVICES") or ""
    if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text):
        return present
    return [present[index] for index in map(int, text.split(",")) if index < len(present)]


def _selection(environment: Mapping[str, str]) -> Check:
    """The variables that choose NPUs, and those that keep torch-rbln from loading."""
    # An empty one counts as unset, for torch-rbln too (0.12.0).
    environment = {key: text for key, text in environment.items() if text}
    name = "NPU selection"
    wrong: list[tuple[str, str]] = []
    for key in ("RBLN_DEVICES", "RBLN_VISIBLE_DEVICES"):
        text = environment.get(key)
        if text is None:
            continue
        parts = [part.strip() for part in text.split(",")]
        if not all(part.isdigit() for part in parts) or len(set(parts)) != len(parts):
            wrong.append((f"{key}={text!r}", f"{key} to NPU numbers without repeats, such as 0,1"))
    text = environment.get("RBLN_NPUS_PER_DEVICE")
    if text is not None and not re.fullmatch("[1-9][0-9]*", text.strip()):
        wrong.append(
            (f"RBLN_NPUS_PER_DEVICE={text!r}", "RBLN_NPUS_PER_DEVICE to a number from 1 on")
        )
    text = environment.get("RBLN_DEVICE_MAP")
    group = r"\[\s*\d+\s*(,\s*\d+\s*)*\]"
    if text is not None and not re.fullmatch(rf"\s*{group}\s*(,\s*{group}\s*)*", text):
        wrong.append(
            (f"RBLN_DEVICE_MAP={text!r}", "RBLN_DEVICE_MAP to groups, such as [0,1],[2,3]")
        )
    if wrong:
        return failed(
            name,
            f"{', '.join(found for found, _ in wrong)}: not understood",
            f"set {'; '.join(right for _, right in wrong)}; or unset it",
        )
    autoload = environment.get("TORCH_DEVICE_BACKEND_AUTOLOAD")
    if autoload == "0":
        return failed(
            name,
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0: torch does not load torch-rbln",
            "unset TORCH_DEVICE_BACKEND_AUTOLOAD",
        )
    if environment.get("RBLN_DEVICES") and environment.get("RBLN_VISIBLE_DEVICES"):
        return warning(
            name,
            "RBLN_DEVICES and RBLN_VISIBLE_DEVICES are both set; the first one counts",
            "unset RBLN_VISIBLE_DEVICES",
        )
    chosen = [f"{key}={environment[key]}" for key in npu.SELECTION_VARIABLES if key in environment]
    return ok(name, ", ".join(chosen) or "all that are visible")


# -- LMCache and its backend -------------------------------------------------------------------


def _lmcache() -> Check:
    found = installed("lmcache")
    low, high = versions.SUPPORTED
    wanted = f"pip install 'lmcache>={low},<{high}'"
    if not found:
        return failed("lmcache", "not installed", wanted)
    if not versions.is_supported(found):
        return failed("lmcache", f"{found}; supported: {low} up to, not including, {high}", wanted)
    if not versions.is_tested(found):
        return warning(
            "lmcache",
            f"{found}; tested: {', '.join(versions.TESTED)}",
            f"pip install lmcache=={versions.TESTED[-1]}",
        )
    return ok("lmcache", found)


def _providers() -> Check:
    name = "backend providers"
    providers: dict[str, str] = {}
    groups: dict[str, list[str]] = {}
    ours_registered = False
    for group in _GROUPS:
        for entry in importlib_metadata.entry_points(group=group, name="rbln"):
            dist = entry.dist
            who = f"{dist.name} {dist.version}" if dist is not None else "an unknown distribution"
            groups.setdefault(f"{who} ({entry.value})", []).append(group)
            if group == _GROUPS[0]:
                providers[entry.value] = who
                ours_registered |= entry.value == "lmcache_rbln.device_spec:RblnDeviceSpec"
    listed = "; ".join(f"{who} in {', '.join(found)}" for who, found in sorted(groups.items()))
    if not ours_registered:
        return failed(
            name,
            listed or f"none: no distribution has the entry point rbln in {_GROUPS[0]}",
            "pip install --force-reinstall --no-deps lmcache-rbln (another package of that name "
            "may have replaced it: pip show -f lmcache-rbln)",
        )
    if len(providers) > 1:
        # LMCache sorts by the entry point's value and keeps the first (0.5.4-0.5.6).
        first = min(providers)
        others = " ".join(sorted({who.split()[0] for who in providers.values()} - {"lmcache-rbln"}))
        say = warning if first.startswith("lmcache_rbln.") else failed
        return say(
            name,
            f"{len(providers)} provide rbln: {listed}; LMCache takes {providers[first]}",
            f"pip uninstall {others}",
        )
    return ok(name, listed)


def _backend(facts: Facts) -> Check:
    name = "LMCache's backend"
    found = facts.get("lmcache")
    pins = ", ".join(
        f"{key}={os.environ[key]}"
        for key in ("LMCACHE_DEVICE_BACKEND", "DEVICE_TYPE", "LMCACHE_MP_TRANSFER_MODE")
        if os.environ.get(key)
    )
    because = f" ({pins})" if pins else ""
    mode = os.environ.get("LMCACHE_MP_TRANSFER_MODE", "").strip().lower()
    if mode not in ("", "auto", "engine_driven"):
        why = (
            "the server cannot reach an NPU's memory"
            if mode == "lmcache_driven"
            else "LMCache knows auto, engine_driven and lmcache_driven"
        )
        return failed(
            name, f"LMCACHE_MP_TRANSFER_MODE={mode}: {why}", "unset LMCACHE_MP_TRANSFER_MODE"
        )
    if found is None:
        return failed(name, f"not reached{because}", "mend the lines above first")
    if "error" in found:
        return failed(
            name,
            f"LMCache cannot be imported{because}: {' '.join(str(found['error']).split())[:300]}",
            "set LMCACHE_DEVICE_BACKEND=rbln, or unset what is set, and mend the lines above"
            if pins
            else "mend the lines above first; if all are ok, pip install --force-reinstall --no-deps "
            f"lmcache=={installed('lmcache') or versions.TESTED[-1]}",
        )
    if facts.get("runtime", {}).get("error") and installed("torch-rbln"):
        return failed(
            name,
            f"none{because}: without its runtime torch-rbln breaks the import of torch, and so of "
            "LMCache",
            "mend the lines above first",
        )
    chosen = f"{found['spec']} for {found['device']}{because}"
    if found["spec"] == OUR_SPEC:
        instead = f", instead of the bundled {found['taken_over']}" if found["taken_over"] else ""
        why = "" if pins else ", since torch-rbln sees an NPU"
        return ok(name, f"{chosen}{why}{instead}")
    if not facts.get("npu", {}).get("available"):
        return failed(
            name,
            f"{chosen}, because no NPU is available: {facts.get('npu', {}).get('reason', '')}",
            "mend the lines above first",
        )
    if pins:
        return failed(
            name, f"{chosen}, which the environment pins", "set LMCACHE_DEVICE_BACKEND=rbln"
        )
    return failed(
        name,
        f"{chosen}, not lmcache-rbln",
        "run with LMCACHE_LOG_LEVEL=DEBUG: python -c 'import lmcache', and see what it says of rbln",
    )


def _blocks_first(facts: Facts) -> Check:
    name = "KV layouts"
    found = facts.get("lmcache", {})
    if found.get("spec") != OUR_SPEC or facts.get("runtime", {}).get("error"):
        return ok(name, "not looked at: the backend is not in use")
    if found["blocks_first"]:
        return ok(name, "blocks-first, K/V-first and MLA can be registered")
    return failed(
        name,
        "blocks-first cannot be registered: LMCache's table of layouts has changed",
        f"pip install lmcache=={versions.TESTED[-1]}",
    )


def _settings(environment: Mapping[str, str]) -> Check:
    name = "settings"
    mine = {key: value for key, value in environment.items() if key.startswith("LMCACHE_RBLN_")}
    unknown = sorted(set(mine) - set(SETTINGS))
    no_effect = f"unknown, and so without effect: {', '.join(unknown)}"
    wrong = {
        key: value
        for key, value in sorted(mine.items())
        if key in SETTINGS and value.strip() and not SETTINGS[key][0](value.strip())
    }
    if wrong:
        found = ", ".join(f"{key}={value!r}" for key, value in wrong.items())
        return failed(
            name,
            f"not understood: {found}" + (f"; {no_effect}" if unknown else ""),
            "; ".join(f"set {key} to {SETTINGS[key][1]}, or unset it" for key in wrong),
        )
    if unknown:
        return warning(name, no_effect, f"correct the name; there are {', '.join(SETTINGS)}")
    return ok(
        name, ", ".join(f"{key}={value}" for key, value in sorted(mine.items())) or "defaults"
    )


# -- the engine --------------------------------------------------------------------------------


def _engine() -> Check:
    name = "engine"
    vllm, vllm_rbln = installed("vllm"), installed("vllm-rbln")
    install = "pip install 'vllm-rbln>=0.12,<0.13' from the RBLN SDK, with the vLLM it asks for"
    if not vllm and not vllm_rbln:
        return failed(
            name,
            "neither vllm nor vllm-rbln is installed",
            f"{install}; on a host without an engine (a server, the demo): --no-engine",
        )
    found = f"vllm {vllm or 'is not installed'}, vllm-rbln {vllm_rbln or 'is not installed'}"
    if not vllm or not vllm_rbln:
        return failed(name, found, install)
    if not (vllm_rbln.startswith(VLLM_RBLN_SERIES) and vllm.startswith(VLLM_SERIES)):
        return warning(name, f"{found}; tested with vllm 0.30 and vllm-rbln 0.12", f"{install}")
    if os.environ.get("VLLM_RBLN_USE_DEVICE_TENSOR") != "1":
        return warning(
            name,
            f"{found}; VLLM_RBLN_USE_DEVICE_TENSOR=1 is not set here, and an engine started without "
            "it has its KV cache on meta, which cannot be cached",
            "set VLLM_RBLN_USE_DEVICE_TENSOR=1 in the engine's environment",
        )
    return ok(name, found)


def _connector() -> Check:
    """Whether vLLM-RBLN's connector name leads to a class; read, not imported: vLLM takes long."""
    name = "connector"
    try:
        spec = importlib.util.find_spec(_CONNECTOR_MODULE)
    except ImportError as exc:
        return failed(
            name,
            f"{_CONNECTOR_MODULE}: {exc}",
            "pip install --force-reinstall --no-deps lmcache-rbln",
        )
    if spec is None or not spec.origin or not _defines(Path(spec.origin), CONNECTOR):
        return failed(
            name,
            f"{_CONNECTOR_MODULE} has no {CONNECTOR}",
            "pip install --force-reinstall --no-deps lmcache-rbln",
        )
    engine = importlib.util.find_spec("vllm_rbln")
    if engine is None or not engine.submodule_search_locations:
        return ok(name, f"{CONNECTOR} is here; there is no vllm-rbln to register it")
    registering = [
        path
        for folder in engine.submodule_search_locations
        for path in Path(folder, "patches").glob("*connector*.py")
        if CONNECTOR in path.read_text(errors="replace")
    ]
    if not registering:
        return warning(
            name,
            f"vllm-rbln {installed('vllm-rbln')} does not register the name {CONNECTOR}",
            'add "kv_connector_module_path": "lmcache_rbln.integration.vllm.connector" to '
            "--kv-transfer-config",
        )
    return ok(name, f"{CONNECTOR}, registered by vllm-rbln, is {_CONNECTOR_MODULE}")


def _defines(path: Path, class_name: str) -> bool:
    tree = ast.parse(path.read_text())
    return any(isinstance(node, ast.ClassDef) and node.name == class_name for node in tree.body)


# -- the host's memory -------------------------------------------------------------------------


def memlock(pool: int | None) -> Check:
    """The limit of locked memory, against the server's pool where that is known."""
    name = "locked memory"
    limit = host_memory.lock_limit()
    if limit is None:
        return ok(name, "no limit")
    found = f"at most {limit / 2**20:.0f} MiB"
    if pool is not None and limit >= pool:
        return ok(name, found)
    return warning(
        name,
        f"{found}: less than the server's pool, which is then not locked for DMA",
        "raise it for engine and server: ulimit -l unlimited, LimitMEMLOCK=infinity (systemd), "
        "--ulimit memlock=-1 (docker)",
    )
