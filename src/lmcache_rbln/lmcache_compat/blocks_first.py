# SPDX-License-Identifier: Apache-2.0
"""Teaching LMCache's vLLM detector the layouts of an RBLN KV cache.

What: LMCache's detector for vLLM is replaced by a subclass that decides for tensors on ``rbln``
itself, and hands everything else to the original.
Why: released LMCache cannot register blocks-first HND; it would take ``[2, 2, H, 1, BS, D]`` for
K/V-first without asking; and it lets ``meta``, mixed and padded caches through to the first store.
Blocks-first is reported as the K/V-first format with its first two axes exchanged, which is what
its block and head counts then read correctly; ``kv_layout`` tells the two apart by their strides.
Versions: 0.5.4, 0.5.5, 0.5.6.
Obsolete: once LMCache's own format ``NL_X_NB_TWO_NH_ONE_BS_HS`` (0.5.7) is in the oldest supported
release. Where LMCache has it, its detector is left alone; what it lets through, the device
operation refuses at the first transfer.
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import wrapt

from lmcache_rbln._log import logger_of
from lmcache_rbln.lmcache_compat import selected
from lmcache_rbln.lmcache_compat.relied_on import ChangedError, has_module, require_exactly

_logger = logger_of("blocks_first")

_REGISTRY_MODULE = "lmcache.v1.gpu_connector.kv_format.detectors.registry"

#: LMCache's own name for blocks-first.
_NATIVE_FORMAT = "NL_X_NB_TWO_NH_ONE_BS_HS"

_installed = False


def is_installed() -> bool:
    """Whether the detector for RBLN caches is in place in this process."""
    return _installed


def is_native() -> bool:
    """Whether this LMCache knows blocks-first itself."""
    from lmcache.lmcache_native import EngineKVFormat

    return hasattr(EngineKVFormat, _NATIVE_FORMAT)


def install_when_needed() -> None:
    """Install the detector as soon as LMCache imports its table of detectors.

    Not now: that table cannot be imported while LMCache initialises.
    """
    if has_module(_REGISTRY_MODULE):
        wrapt.register_post_import_hook(_install, _REGISTRY_MODULE)
    else:
        _step_aside("there is no such module")


def _step_aside(change: object) -> None:
    _logger().warning(
        "lmcache-rbln cannot add its KV layouts to LMCache (%s has changed: %s): blocks-first "
        "caches cannot be registered. This release of LMCache is not supported.",
        _REGISTRY_MODULE,
        change,
    )


def _install(registry: ModuleType) -> None:
    global _installed
    try:
        if is_native():
            _logger().debug("LMCache knows blocks-first itself (%s)", _NATIVE_FORMAT)
            return
        from lmcache.utils import EngineType

        _replace(registry, EngineType.VLLM)
    except KeyError as exc:
        _step_aside(f"DETECTORS has no {exc}")
    except (ChangedError, AttributeError, ImportError, TypeError, ValueError) as exc:
        _step_aside(exc)
    else:
        _installed = True


def _replace(registry: Any, engine: Any) -> None:
    """Put our detector where LMCache looks for one, or leave the table as it was."""
    original = registry.DETECTORS[engine]
    registry.DETECTORS[engine] = detector = _detector(original)
    found = None
    try:
        found = type(registry.get_detector(engine))
    finally:
        if found is not detector:
            registry.DETECTORS[engine] = original
    if found is not detector:
        raise ChangedError("get_detector() does not look into DETECTORS")


def _detector(original: Any) -> Any:
    """LMCache's detector, extended.

    Raises:
        ChangedError, AttributeError, ImportError, TypeError, ValueError: What it relies on is not
            so.
    """
    from lmcache.lmcache_native import EngineKVFormat

    from lmcache_rbln import kv_layout

    if not inspect.isclass(original):
        raise ChangedError(f"the detector is {original!r}, no class")
    require_exactly(original, "discover", "kv_caches", "layout_hints")
    formats = {
        kv_layout.KVLayout.KV_FIRST: EngineKVFormat.NL_X_TWO_NB_NH_ONE_BS_HS,
        kv_layout.KVLayout.MLA: EngineKVFormat.NL_X_NB_BS_HS,
    }
    # Another backend, such as the bundled one, knows nothing of these views.
    is_selected = selected.name().startswith("lmcache_rbln.")

    class RblnDetector(original):  # type: ignore[misc]
        """LMCache's vLLM detector, which knows the KV caches of an RBLN NPU too."""

        def discover(self, kv_caches: Any, layout_hints: Any) -> Any:
            if not (is_selected and _is_rbln(kv_caches)):
                return super().discover(kv_caches, layout_hints)
            paged = kv_layout.resolve(kv_caches)
            if paged.layout is kv_layout.KVLayout.BLOCKS_FIRST:
                return formats[kv_layout.KVLayout.KV_FIRST], [
                    layer.transpose(0, 1) for layer in paged.layers
                ]
            return formats[paged.layout], list(paged.layers)

    return RblnDetector


def _is_rbln(kv_caches: Any) -> bool:
    """Whether these are the caches of an RBLN worker; a ``meta`` cache can be of no other."""
    import torch

    if not isinstance(kv_caches, list):
        return False
    return any(
        isinstance(layer, torch.Tensor) and layer.device.type in ("rbln", "meta")
        for layer in kv_caches
    )
