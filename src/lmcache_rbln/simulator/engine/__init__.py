# SPDX-License-Identifier: Apache-2.0
"""vLLM-RBLN's engine on the simulated NPU: the stand-in for the vendor's compiler package.

The package `rebel` lives below `site/`, a folder that no import path holds except where
`environment()` is applied.
"""

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["RealCompilerInstalledError", "environment", "site_directory"]

_PACKAGE = "rebel"
_FALLBACK = "TORCH_RBLN_DISABLE_FALLBACK"


class RealCompilerInstalledError(RuntimeError):
    """The vendor's own compiler package is installed, so the stand-in must not hide it."""


def site_directory() -> Path:
    """The folder that makes the stand-in importable when it is on the import path."""
    return Path(__file__).parent / "site"


def environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables that let a child process run vLLM-RBLN's engine on the simulated NPU.

    Args:
        base: the environment to extend, `os.environ` by default.

    Returns:
        Only the variables to set.

    Raises:
        RealCompilerInstalledError: if `rebel` can be imported here already.
    """
    base = os.environ if base is None else base
    site = str(site_directory())
    found = importlib.util.find_spec(_PACKAGE)
    origins = [] if found is None else [found.origin, *(found.submodule_search_locations or ())]
    foreign = [origin for origin in origins if origin and not _inside(origin, site)]
    if foreign:
        raise RealCompilerInstalledError(
            f"the package {_PACKAGE!r} is installed at {foreign[0]}; the simulated engine would "
            "hide the vendor's compiler. Use an environment without rebel-compiler, or run the "
            "command without --engine."
        )
    inherited = base.get("PYTHONPATH")
    paths = [site, *(p for p in (inherited or "").split(os.pathsep) if p and p != site)]
    variables = {"PYTHONPATH": os.pathsep.join(paths)}
    if _FALLBACK not in base:
        # What has no model must be seen; torch-rbln would run it on the CPU as if it were compiled.
        variables[_FALLBACK] = "compile_error"
    return variables


def _inside(path: str, directory: str) -> bool:
    return Path(path).resolve().is_relative_to(Path(directory).resolve())
