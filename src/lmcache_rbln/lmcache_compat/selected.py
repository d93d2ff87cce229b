# SPDX-License-Identifier: Apache-2.0
"""Which backend LMCache has selected in this process, and what it keeps.

What: ``lmcache.v1.platform.current_device_spec``, an instance, and its ``_get_pin_backend``.
Why: LMCache names its backend in the log only.
Versions: 0.5.4, 0.5.5, 0.5.6.
Obsolete: once LMCache has a public function that tells.
"""

from __future__ import annotations

from typing import Any


def spec() -> Any:
    """The selected ``DeviceSpec``; starts LMCache."""
    from lmcache.v1.platform import current_device_spec

    return current_device_spec


def name() -> str:
    """The selected class, as ``module.Class``."""
    kind = type(spec())
    return f"{kind.__module__}.{kind.__qualname__}"


def pin_backend() -> Any:
    """What the selected backend pins host memory with."""
    return spec()._get_pin_backend()
