# SPDX-License-Identifier: Apache-2.0
"""Teaching LMCache's vLLM detector the layouts of an RBLN KV cache.

What: LMCache's detector for vLLM is replaced by a subclass that decides for tensors on ``rbln``
itself, and hands everything else to the original.
Why: released LMCache cannot register blocks-first HND; it would take ``[2, 2, H, 1, BS, D]`` for
K/V-first without asking; and it lets ``meta``, mixed and padded caches through to the first store.
Blocks-first is reported as the K/V-first format with its first two axes exchanged, which is what
its block and head counts then read correctly; ``kv_layout`` tells the two apart by their strides.
Versions: 0.5.4, 0.5.5, 0.5.6.
Obsolete: once LMCache's own format ``NL_X_NB_TWO_NH_ONE_BS_HS`` is in the oldest supported release.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import wrapt

from lmcache_rbln._log import logger_of

_logger = logger_of("blocks_first")

_REGISTRY_MODULE = "lmcache.v1.gpu_connector.kv_format.detectors.registry"

_installed = False


def is_installed() -> bool:
    """Whether the detector for RBLN caches is in place in this process."""
    return _installed


def install_when_needed() -> None:
    """Install the detector as soon as LMCache imports its table of detectors.

    Not now: that table cannot be imported while LMCache initialises.
    """
    wrapt.register_post_import_hook(_install, _REGISTRY_MODULE)


def _install(registry: ModuleType) -> None:
    global _installed
    from lmcache.utils import EngineType

    try:
        original = registry.DETECTORS[EngineType.VLLM]
        if not callable(original.discover):
            raise TypeError(f"{original!r}.discover is not callable")
    except (AttributeError, KeyError, TypeError) as exc:
        _logger().warning(
            "lmcache-rbln cannot add its KV layouts to LMCache (%s has changed: %r): blocks-first "
            "caches cannot be registered. This release of LMCache is not supported.",
            _REGISTRY_MODULE,
            exc,
        )
        return
    registry.DETECTORS[EngineType.VLLM] = _detector(original)
    _installed = True


def _detector(original: Any) -> Any:
    from lmcache.lmcache_native import EngineKVFormat

    from lmcache_rbln import kv_layout

    formats = {
        kv_layout.KVLayout.KV_FIRST: EngineKVFormat.NL_X_TWO_NB_NH_ONE_BS_HS,
        kv_layout.KVLayout.MLA: EngineKVFormat.NL_X_NB_BS_HS,
    }

    class RblnDetector(original):  # type: ignore[misc]
        """LMCache's vLLM detector, which knows the KV caches of an RBLN NPU too."""

        def discover(self, kv_caches: Any, layout_hints: Any) -> Any:
            if not _is_rbln(kv_caches):
                return super().discover(kv_caches, layout_hints)
            paged = kv_layout.resolve(kv_caches)
            if paged.layout is kv_layout.KVLayout.BLOCKS_FIRST:
                return formats[kv_layout.KVLayout.KV_FIRST], [
                    layer.transpose(0, 1) for layer in paged.layers
                ]
            return formats[paged.layout], list(paged.layers)

    return RblnDetector


def _is_rbln(kv_caches: Any) -> bool:
    """Whether these are the caches of an RBLN worker; a ``meta`` cache is, where RBLN is selected."""
    import torch
    from lmcache import torch_device_type

    if not isinstance(kv_caches, list):
        return False
    kinds = {layer.device.type for layer in kv_caches if isinstance(layer, torch.Tensor)}
    return "rbln" in kinds or ("meta" in kinds and torch_device_type == "rbln")
