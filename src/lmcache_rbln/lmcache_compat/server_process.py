# SPDX-License-Identifier: Apache-2.0
"""Start, watch and stop a real ``lmcache server`` process.

The demo, the benchmark and the tests each run servers of their own, beside whatever else runs on
the host: ports are free ones, the shared-memory segment has a name of its own, nothing is sent to
LMCache's usage statistics, and nothing is left behind when the server ends.

Neither torch nor LMCache is imported here.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from lmcache_rbln.lmcache_compat.shared_memory import SHM_FOLDER, SHM_PREFIX

__all__ = ["LMCacheServer", "ServerFailed", "free_ports", "terminate_as_exit"]

#: Free ports are found, given back and then used: another process may take one in between.
_PORT_ATTEMPTS = 3


class ServerFailed(RuntimeError):  # noqa: N818
    """The server did not start, or ended by itself. The message ends with its last log lines."""


class LMCacheServer:
    """A running ``lmcache server`` that serves engine-driven workers on 127.0.0.1.

    Use it as a context manager, or call :meth:`start` and :meth:`stop`. A server that was killed
    (:meth:`kill`) can be started again, at the same address.

    Args:
        chunk_size: tokens a chunk.
        pool_gb: size of the server's memory for chunks, in GiB; all of it in ``/dev/shm`` with
            shared memory.
        shared_memory: whether workers get the pool as shared memory; else chunks are pickled.
        arguments: more arguments of ``lmcache server``; they come last and so override.
        environment: the process's environment; default: this process's.
        log_path: where the server's output goes; default: a temporary file that is removed
            at :meth:`stop`.
    """

    def __init__(
        self,
        *,
        chunk_size: int,
        pool_gb: float,
        shared_memory: bool = True,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        log_path: Path | None = None,
    ) -> None:
        self.chunk_size = chunk_size
        self.pool_gb = pool_gb
        self.shared_memory = shared_memory
        self._arguments = tuple(arguments)
        self._environment = dict(os.environ if environment is None else environment)
        self._folder: Path | None = None
        self._log: Path | None = log_path
        self._process: subprocess.Popen[bytes] | None = None
        self._port = self._http_port = 0
        # Process id and random digits: unique on the host, and telling whose it is.
        self._shm_name = f"{SHM_PREFIX}rbln_{os.getpid()}_{secrets.token_hex(4)}"

    # -- what it is ------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """The address for workers."""
        return f"tcp://127.0.0.1:{self._port}"

    @property
    def http_port(self) -> int:
        """Port of the HTTP pages on 127.0.0.1, such as ``/healthcheck`` and ``/status``."""
        return self._http_port

    @property
    def pid(self) -> int:
        """The process id.

        Raises:
            RuntimeError: the server was not started.
        """
        if self._process is None:
            raise RuntimeError("the server was not started")
        return self._process.pid

    @property
    def shm_path(self) -> Path | None:
        """The shared-memory segment as a file; None without shared memory."""
        return SHM_FOLDER / self._shm_name if self.shared_memory else None

    def is_running(self) -> bool:
        """Whether the process lives."""
        return self._process is not None and self._process.poll() is None

    def log_tail(self, lines: int = 40) -> str:
        """The last lines of the server's output; empty before the start."""
        if self._log is None:
            return ""
        try:
            text = self._log.read_text(errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.splitlines()[-lines:])

    # -- start and stop ----------------------------------------------------------------------

    def start(self, timeout: float = 180.0) -> LMCacheServer:
        """Start the server and wait until it is healthy.

        Args:
            timeout: seconds until it must be.

        Raises:
            ServerFailed: it ended, or was not healthy in time; nothing of it is left.
            RuntimeError: it runs already.
        """
        if self.is_running():
            raise RuntimeError("the server runs already")
        deadline = time.monotonic() + timeout
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            self._spawn()
            try:
                self._wait_until_healthy(deadline)
            except ServerFailed as error:
                self.stop()
                if attempt < _PORT_ATTEMPTS and "address already in use" in str(error).lower():
                    self._port = self._http_port = 0
                    continue
                raise
            except BaseException:
                self.stop()
                raise
            return self
        raise AssertionError("unreachable")

    def stop(self, timeout: float = 20.0) -> None:
        """End the server: SIGTERM, and SIGKILL if it lives ``timeout`` seconds later.

        Its shared-memory segment is gone afterwards, and so is its log unless ``log_path`` was
        given. Harmless to repeat.
        """
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdin is not None:
                process.stdin.close()
        self._remove_leftovers()

    def kill(self) -> None:
        """End the server with SIGKILL, as a crash would, and leave everything as it is.

        :meth:`stop` must follow, or :meth:`start` for a restart at the same address.
        """
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> LMCacheServer:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _spawn(self) -> None:
        if not self._port:
            self._port, self._http_port = free_ports(2)
        if self._log is None:
            self._folder = Path(tempfile.mkdtemp(prefix="lmcache-rbln-server-"))
            self._log = self._folder / "server.log"
        assert self._log is not None
        environment = {
            **self._environment,
            # LMCache would ask the device for its properties and report them to its makers.
            "LMCACHE_TRACK_USAGE": "false",
            "LMCACHE_DISABLE_BANNER": "1",
            "PYTHONUNBUFFERED": "1",
        }
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command_line(),
                # Held open by this process: its end is the launcher's sign to stop.
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                # Ctrl-C is for the starter, who then stops the server in order.
                start_new_session=True,
            )

    def _command_line(self) -> list[str]:
        return [
            *(sys.executable, "-m", "lmcache_rbln.lmcache_compat.server_launcher"),
            *("--host", "127.0.0.1", "--port", str(self._port)),
            *("--http-host", "127.0.0.1", "--http-port", str(self._http_port)),
            *("--chunk-size", str(self.chunk_size)),
            *("--l1-size-gb", str(self.pool_gb), "--eviction-policy", "LRU"),
            # RBLN memory has no handle that the server could open: workers move the bytes.
            *("--supported-transfer-mode", "engine_driven"),
            # A pool that grows lazily is not shared; the server would fall back to pickle.
            "--no-l1-use-lazy",
            *("--shm-name", self._shm_name if self.shared_memory else ""),
            *self._arguments,
        ]

    def _wait_until_healthy(self, deadline: float) -> None:
        assert self._process is not None
        while True:
            code = self._process.poll()
            if code is not None:
                raise ServerFailed(
                    f"lmcache server ended with exit code {code} before it was ready; "
                    f"its log ends:\n{self.log_tail()}"
                )
            if self.healthy():
                return
            if time.monotonic() > deadline:
                raise ServerFailed(
                    f"lmcache server was not ready in time; its log ends:\n{self.log_tail()}"
                )
            time.sleep(0.2)

    def healthy(self) -> bool:
        """Whether the server answers its health check with a yes."""
        connection = http.client.HTTPConnection("127.0.0.1", self._http_port, timeout=2.0)
        try:
            connection.request("GET", "/healthcheck")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _remove_leftovers(self) -> None:
        # A server that was killed leaves its segment: memory of the host until someone removes it.
        if self.shm_path is not None:
            self.shm_path.unlink(missing_ok=True)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = self._log = None


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nothing listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


@contextlib.contextmanager
def terminate_as_exit() -> Iterator[None]:
    """Within the block SIGTERM and SIGHUP raise ``SystemExit``, so that servers stop in order.

    The exit code is 128 and the signal's number. A SIGHUP that is ignored, as under ``nohup``, stays
    so. Only the main thread may set signal handlers; elsewhere nothing is changed.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before: dict[signal.Signals, Any] = {}
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                with contextlib.suppress(ValueError):
                    before[number] = signal.signal(number, leave)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
