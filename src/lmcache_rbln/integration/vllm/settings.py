# SPDX-License-Identifier: Apache-2.0
"""What the connector is told: LMCache's own keys, checked, and which server it talks to.

The server is looked for in this order: ``kv_connector_extra_config`` with LMCache's own keys, the environment variable
``LMCACHE_RBLN_SERVER``, and LMCache's default port on this host.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from typing import Any

#: Address of the LMCache server, for deployments that set no extra config.
SERVER_VARIABLE = "LMCACHE_RBLN_SERVER"
#: LMCache's default port (0.5.4 to 0.5.6).
DEFAULT_SERVER = "tcp://127.0.0.1:5555"

#: LMCache's keys for the server (0.5.4 to 0.5.6); any of them means that the user has chosen.
SERVER_URLS_KEY = "lmcache.mp.server_urls"
_HOST_KEY, _PORT_KEY = "lmcache.mp.host", "lmcache.mp.port"
_SERVER_KEYS = (SERVER_URLS_KEY, _HOST_KEY, _PORT_KEY)

MODE_KEY = "lmcache.mp.mp_transfer_mode"
MODES = ("auto", "engine_driven", "lmcache_driven")
_SECONDS_KEYS = ("lmcache.mp.mq_timeout", "lmcache.mp.heartbeat_interval")
#: LMCache takes any string for true here, "false" as well.
_FLAG_KEYS = (
    "lmcache.mp.eager_prefetch",
    "lmcache.mp.lazy_offload",
    "lmcache.mp.save_decode_cache",
    "lmcache.mp.transfer_intermediate_tensors",
)

_ADDRESS = re.compile(
    r"(?:[a-z][a-z0-9+.-]*://)?(?:\[[0-9a-fA-F:.]+\]|[^\s:/,\[\]]+):(?P<port>\d{1,5})"
)


def with_server(extra_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the extra config with the server filled in where it names none.

    Raises:
        ValueError: A key of LMCache has a value that means nothing, or ``LMCACHE_RBLN_SERVER`` is
            needed and is no address.
    """
    _refuse_meaningless(extra_config)
    if any(extra_config.get(key) for key in _SERVER_KEYS):
        return dict(extra_config)
    address = os.environ.get(SERVER_VARIABLE, "").strip() or DEFAULT_SERVER
    if not is_address(address):
        raise ValueError(
            f"{SERVER_VARIABLE}={address!r} is no server address; expected one like "
            f"{DEFAULT_SERVER} or kv-host:5555. For several servers use kv_connector_extra_config "
            f"with {SERVER_URLS_KEY}"
        )
    return {**extra_config, SERVER_URLS_KEY: address}


def _refuse_meaningless(extra_config: Mapping[str, Any]) -> None:
    """Refuse what LMCache would trip over later, or take for something else."""
    checks = (
        *((key, _is_seconds, "a number of seconds, more than 0") for key in _SECONDS_KEYS),
        *((key, lambda value: isinstance(value, bool), "true or false") for key in _FLAG_KEYS),
        (MODE_KEY, _is_mode, f"one of {', '.join(MODES)}"),
        (SERVER_URLS_KEY, _are_addresses, f"addresses like {DEFAULT_SERVER}, comma-separated or "
         "as a list"),
        (_HOST_KEY, _is_host, "a host like tcp://kv-host"),
        (_PORT_KEY, _is_port, "a port from 1 to 65535"),
    )  # fmt: skip
    for key, is_meaningful, expected in checks:
        value = extra_config.get(key)
        if value is not None and not is_meaningful(value):
            raise ValueError(
                f"kv_connector_extra_config has {key}={value!r}; expected {expected}, or leave the "
                "key out"
            )


def _is_seconds(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return False
    try:
        return 0 < float(value) < math.inf
    except (ValueError, OverflowError):
        return False


def _is_mode(value: Any) -> bool:
    return isinstance(value, str) and value.lower() in MODES


def is_address(text: Any) -> bool:
    """Whether this is one server's address, with a port."""
    match = _ADDRESS.fullmatch(text.strip()) if isinstance(text, str) else None
    return match is not None and _is_port(match["port"])


def _are_addresses(value: Any) -> bool:
    if value == "":
        return True
    addresses = value.split(",") if isinstance(value, str) else value
    if not isinstance(addresses, list):
        return False
    # LMCache overlooks what a comma too many leaves.
    named = [address for address in addresses if address != "" and not str(address).isspace()]
    return bool(named) and all(map(is_address, named))


def _is_host(value: Any) -> bool:
    return value == "" or is_address(f"{value}:1" if isinstance(value, str) else value)


def _is_port(value: Any) -> bool:
    if isinstance(value, str):
        return value.isascii() and value.isdigit() and len(value) < 6 and 0 < int(value) < 65536
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 65536
