# SPDX-License-Identifier: Apache-2.0
"""Which LMCache server a connector talks to.

In this order: ``kv_connector_extra_config`` with LMCache's own keys, the environment variable
``LMCACHE_RBLN_SERVER``, and LMCache's default port on this host.
"""

from __future__ import annotations

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
_SERVER_KEYS = (SERVER_URLS_KEY, "lmcache.mp.host", "lmcache.mp.port")

_ADDRESS = re.compile(
    r"(?:[a-z][a-z0-9+.-]*://)?(?:\[[0-9a-fA-F:.]+\]|[^\s:/,\[\]]+):(?P<port>\d{1,5})"
)


def with_server(extra_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the extra config with the server filled in where it names none.

    Raises:
        ValueError: ``LMCACHE_RBLN_SERVER`` is needed and is no address.
    """
    if any(extra_config.get(key) for key in _SERVER_KEYS):
        return dict(extra_config)
    address = os.environ.get(SERVER_VARIABLE, "").strip() or DEFAULT_SERVER
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise ValueError(
            f"{SERVER_VARIABLE}={address!r} is no server address; expected one like "
            f"{DEFAULT_SERVER} or kv-host:5555. For several servers use kv_connector_extra_config "
            f"with {SERVER_URLS_KEY}"
        )
    return {**extra_config, SERVER_URLS_KEY: address}
