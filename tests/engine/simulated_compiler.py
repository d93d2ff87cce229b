# SPDX-License-Identifier: Apache-2.0
"""The stand-in compiler's operators for tests, without putting it on the import path."""

import importlib
import importlib.util
import sys
from types import ModuleType

from lmcache_rbln.simulator.engine import site_directory

_NAME = "simulated_compiler_under_test"


def load(module: str) -> ModuleType:
    """`rebel.<module>` under another package name: nothing else must find a `rebel`."""
    if _NAME not in sys.modules:
        package = site_directory() / "rebel"
        spec = importlib.util.spec_from_file_location(
            _NAME, package / "__init__.py", submodule_search_locations=[str(package)]
        )
        assert spec is not None and spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        sys.modules[_NAME] = loaded
        spec.loader.exec_module(loaded)
    return importlib.import_module(f"{_NAME}.{module}")
