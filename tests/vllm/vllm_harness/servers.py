# SPDX-License-Identifier: Apache-2.0
"""LMCache servers that a test may freeze, kill and bring back."""

from __future__ import annotations

import os
import signal
from typing import Any

from lmcache_rbln.lmcache_compat.server_process import LMCacheServer, free_ports


class MortalServer:
    """A server at an address that outlives it.

    Args:
        settings: As for ``LMCacheServer``.
    """

    def __init__(self, **settings: Any) -> None:
        (self._port,) = free_ports(1)
        self._settings = {"chunk_size": 64, "pool_gb": 0.25, **settings}
        self._process: LMCacheServer | None = None

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start it, unless it runs."""
        if self._process is not None and self._process.is_running():
            self.thaw()
            return
        self.stop()
        arguments = [*self._settings.get("arguments", ()), "--port", str(self._port)]
        self._process = LMCacheServer(**{**self._settings, "arguments": arguments}).start()

    def kill(self) -> None:
        """End it as a crash would."""
        assert self._process is not None
        self._process.kill()

    def freeze(self) -> None:
        """Stop the process where it stands: requests stay unanswered."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def log_tail(self) -> str:
        assert self._process is not None
        return self._process.log_tail()

    def stop(self) -> None:
        if self._process is not None:
            if self._process.is_running():
                self.thaw()
            self._process.stop()
            self._process = None
