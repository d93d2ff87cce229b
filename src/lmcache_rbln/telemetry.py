# SPDX-License-Identifier: Apache-2.0
"""What was moved: counters, and one DEBUG line a transfer.

==============================  =======  =========================================================
OpenTelemetry counter           unit     counts, by ``direction`` (``store`` or ``retrieve``)
==============================  =======  =========================================================
lmcache_rbln.transfer.blocks    {block}  blocks moved, all layers of a block as one
lmcache_rbln.transfer.bytes     By       bytes moved between NPU and host
lmcache_rbln.transfer.seconds   s        time inside the device operation
lmcache_rbln.transfer.failures  {call}   device operations that raised
==============================  =======  =========================================================

They belong to OpenTelemetry's global meter provider, which LMCache's own metrics use: whoever
sets one in the worker exports them. LMCache (0.5.4 to 0.5.6) sets one in its server only; where
``PROMETHEUS_MULTIPROC_DIR`` is set the counters are therefore kept in Prometheus's multi-process
files too, which vLLM serves at its ``/metrics``. No port is opened here.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from lmcache_rbln import __version__
from lmcache_rbln._log import logger_of

__all__ = ["counted"]

_logger = logger_of("transfer")

#: Where vLLM's processes leave their Prometheus counters; vLLM sets it for several API servers, a
#: user for one.
_PROMETHEUS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"

#: Adds an amount, of a direction, to a counter.
_Sink: TypeAlias = Callable[[float, str], None]

_made: dict[str, list[_Sink]] = {}
_making = threading.Lock()


def _forget_after_fork() -> None:
    # Another thread of the parent may have held it.
    global _making
    _making = threading.Lock()


os.register_at_fork(after_in_child=_forget_after_fork)

_DESCRIPTIONS = {
    "blocks": ("{block}", "KV blocks moved between NPU and host, all layers of a block as one."),
    "bytes": ("By", "Bytes moved between NPU and host."),
    "seconds": ("s", "Seconds inside the KV transfers between NPU and host."),
    "failures": ("{call}", "KV transfers between NPU and host that raised."),
}


def counted(transfer: Callable[..., None]) -> Callable[..., None]:
    """Count what ``multi_layer_block_kv_transfer`` moves; the signature stays its own.

    Args:
        transfer: the method of a ``DeviceOps``.
    """
    names = list(inspect.signature(transfer).parameters)

    @functools.wraps(transfer)
    def run(*args: Any, **kwargs: Any) -> None:
        given = dict(zip(names, args, strict=False)) | kwargs
        direction = {"D2H": "store", "H2D": "retrieve"}.get(
            getattr(given.get("direction"), "name", ""), "unknown"
        )
        started = time.perf_counter()
        try:
            transfer(*args, **kwargs)
        except BaseException as exc:
            _count(direction, failures=1)
            _logger().debug("%s failed: %s: %s", direction, type(exc).__name__, exc)
            raise
        seconds = time.perf_counter() - started
        blocks, nbytes = _moved(given)
        _count(direction, blocks=blocks, bytes=nbytes, seconds=seconds)
        if _logger().isEnabledFor(logging.DEBUG):
            _logger().debug(
                "%s: %d blocks, %.1f MiB in %.2f ms (%.2f GB/s)",
                direction,
                blocks,
                nbytes / 2**20,
                seconds * 1e3,
                nbytes / seconds / 1e9,
            )

    return run


def _moved(given: dict[str, Any]) -> tuple[int, int]:
    """Blocks and bytes of a transfer that succeeded, and whose arguments are therefore sound."""
    blocks = max(0, len(given["block_ids"]) - int(given["skip_prefix_n_blocks"]))
    if not blocks:
        return 0, 0
    chunk = given["lmcache_objects_ptrs"][0]
    token_nbytes = chunk.numel() // chunk.shape[-2] * chunk.element_size()
    return blocks, blocks * int(given["shape_desc"].bs) * token_nbytes


def _count(direction: str, **amounts: float) -> None:
    # A transfer that is done must not fail for a metric.
    try:
        for name, amount in amounts.items():
            for add in _sinks()[name]:
                add(amount, direction)
    except Exception as exc:
        _logger().debug("not counted: %r", exc)


def _sinks() -> Mapping[str, list[_Sink]]:
    """Where each counter goes; made at the first transfer, in the process that does it."""
    global _made
    with _making:
        if not _made:
            _made = {
                name: list(filter(None, (_open_telemetry(name, *how), _prometheus(name, *how))))
                for name, how in _DESCRIPTIONS.items()
            }
    return _made


def _open_telemetry(name: str, unit: str, description: str) -> _Sink | None:
    try:
        from opentelemetry import metrics
    except ImportError:  # LMCache requires it, and does without it.
        return None
    counter = metrics.get_meter("lmcache_rbln", __version__).create_counter(
        f"lmcache_rbln.transfer.{name}", unit=unit, description=description
    )
    return lambda amount, direction: counter.add(amount, {"direction": direction})


def _prometheus(name: str, unit: str, description: str) -> _Sink | None:
    del unit
    if _PROMETHEUS_FOLDER not in os.environ:
        return None
    try:
        from prometheus_client import Counter
    except ImportError:
        return None
    counter = Counter(f"lmcache_rbln_transfer_{name}", description, ["direction"])
    return lambda amount, direction: counter.labels(direction=direction).inc(amount)
