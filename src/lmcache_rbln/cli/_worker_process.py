# SPDX-License-Identifier: Apache-2.0
"""Start a worker process and tell it what to do. Imports neither torch nor LMCache."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from types import TracebackType
from typing import IO, Any

__all__ = ["WorkerFailed", "WorkerProcess"]


class WorkerFailed(RuntimeError):  # noqa: N818
    """A command raised in the worker, or the worker died; the message ends with its last lines."""


class WorkerProcess:
    """A process of its own that holds one NPU; the commands are methods of ``_worker_main.Worker``.

    The process ends when this one does, however it ends.

    Args:
        name: for messages.
        environment: of the process; default: this process's.
    """

    def __init__(self, name: str, *, environment: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._buffer = b""
        # Closed by stop(); it has no name, so it goes with the process in any case.
        self._log: IO[bytes] = tempfile.TemporaryFile(  # noqa: SIM115
            prefix="lmcache-rbln-worker-"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lmcache_rbln.cli._worker_main"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={
                **(os.environ if environment is None else environment),
                # LMCache would ask the device for its properties and report them to its makers.
                "LMCACHE_TRACK_USAGE": "false",
                "LMCACHE_DISABLE_BANNER": "1",
            },
            # Ctrl-C is for the starter, who then ends the worker in order.
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def call(self, command: str, /, *, reply_within: float = 120.0, **arguments: Any) -> Any:
        """Carry out one command and return its result.

        Raises:
            WorkerFailed: the command raised, or the worker died or did not answer in time.
        """
        self.begin(command, **arguments)
        return self.finish(command, reply_within=reply_within)

    def begin(self, command: str, /, **arguments: Any) -> None:
        """Send a command without waiting for it; :meth:`finish` must follow."""
        assert self._process.stdin is not None
        line = json.dumps({"command": command, **arguments}) + "\n"
        # A worker that is dead says so when the reply is read.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()

    def finish(self, command: str, /, *, reply_within: float = 120.0) -> Any:
        """Wait for the reply to the command sent last; as :meth:`call`."""
        reply = json.loads(self._read_line(command, time.monotonic() + reply_within))
        if "error" in reply:
            raise WorkerFailed(self._message(f"{command}: {reply['error']}"))
        return reply["result"]

    def log_tail(self, lines: int = 25) -> str:
        """The last lines of the worker's output."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - 64 * 1024))
        text = self._log.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def stop(self, timeout: float = 20.0) -> None:
        """Let the worker unregister and end; SIGKILL if it lives ``timeout`` seconds later.

        Harmless to repeat.
        """
        if self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()

    def kill(self) -> None:
        """End the worker with SIGKILL, as a crash would."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # After an interrupt or an error nobody waits for a command that may still be running.
        if kind is not None:
            self.kill()
        self.stop()

    def _read_line(self, command: str, deadline: float) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise WorkerFailed(self._message(f"{command}: no answer in time"))
                data = os.read(descriptor, 64 * 1024)
                if not data:
                    code = self._process.wait()
                    raise WorkerFailed(self._message(f"{command}: {_ending(code)}"))
                self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _message(self, what: str) -> str:
        return f"{self.name}: {what}; its output ends:\n{self.log_tail()}"


def _ending(code: int) -> str:
    return f"died of signal {-code}" if code < 0 else f"ended with exit code {code}"
