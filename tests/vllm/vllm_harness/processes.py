# SPDX-License-Identifier: Apache-2.0
"""Worker processes that outlive one test: importing vLLM takes seconds."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


class WorkerHungError(AssertionError):
    """A worker gave no answer in time; the text has the stacks of its threads."""


#: Index of a worker that sees no NPU, so that LMCache takes its CPU backend.
HOST = -1


class WorkerProcess:
    """One worker process, with the NPU of its index for itself."""

    def __init__(self, index: int, folder: Path, environment: dict[str, str]) -> None:
        device = {"RBLN_SIM_NPUS": "0"} if index == HOST else {"RBLN_DEVICES": str(index)}
        self._log = folder / f"worker-{index}-{time.monotonic_ns()}.log"
        self._pipe, inherited = multiprocessing.Pipe()
        # The folder of this package and that of the tests: functions of either may be run.
        paths = [str(Path(__file__).parents[1]), environment.get("PYTHONPATH", "")]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vllm_harness.worker", str(inherited.fileno())],
                pass_fds=[inherited.fileno()],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={
                    **environment,
                    **device,
                    "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                },
                start_new_session=True,
            )
        inherited.close()
        self._unanswered = 0

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def send(self, name: str, *arguments: Any) -> None:
        self._pipe.send((name, arguments))
        self._unanswered += 1

    def receive(self, timeout: float = 60.0) -> Any:
        """The answer to the oldest call without one.

        Raises:
            WorkerHungError: There is none in time.
            BaseException: What the call raised in the worker.
        """
        if not self._pipe.poll(timeout):
            stacks = self.stacks()
            self.kill()
            raise WorkerHungError(f"no answer within {timeout:g} s:\n{stacks}")
        try:
            good, value = self._pipe.recv()
        except EOFError:
            self._process.wait(10)
            raise WorkerHungError(
                f"the worker ended with {self._process.returncode}:\n{self.tail()}"
            ) from None
        self._unanswered -= 1
        if not good:
            raise value
        return value

    def call(self, name: str, *arguments: Any, timeout: float = 60.0) -> Any:
        self.send(name, *arguments)
        return self.receive(timeout)

    def answered(self, within: float) -> bool:
        """Whether an answer is there, after waiting at most so many seconds."""
        return self._pipe.poll(within)

    def finish(self, timeout: float = 30.0) -> None:
        """Stop the runner; a worker that does not answer is killed, and the next test gets another.

        What earlier calls have to say is of no interest any more.
        """
        if not self.is_alive():
            return
        self.send("stop")
        while self._unanswered:
            unanswered = self._unanswered
            try:
                self.receive(timeout)
            except WorkerHungError:
                return
            except Exception:
                if self._unanswered == unanswered:
                    raise

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.log.splitlines()[-lines:])

    def stacks(self) -> str:
        if self.is_alive():
            self._process.send_signal(signal.SIGUSR1)
            time.sleep(1.0)
        return self.tail(150)

    def kill(self) -> None:
        if self.is_alive():
            self._process.kill()
        self._process.wait()
        self._pipe.close()

    def close(self) -> None:
        if self.is_alive():
            self._pipe.close()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()
