# SPDX-License-Identifier: Apache-2.0
"""The simulated runtime itself: called through torch, called directly, and in processes of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lmcache_rbln import simulator
from tests.simulator.native import SUCCESS, Runtime

#: Runs a Python script with the simulated NPUs of a host of its own; settings are keywords.
Script = Callable[..., "subprocess.CompletedProcess[str]"]


def script_environment(**settings: object) -> dict[str, str]:
    """Environment for a script: simulated NPUs, and ``native`` to import."""
    settings = {"host": simulator.unique_host("script"), **settings}
    environment = simulator.environment(
        {name: text for name, text in os.environ.items() if not name.startswith("RBLN_")},
        **settings,
    )
    environment["PYTHONPATH"] = str(Path(__file__).parent)
    return environment


@pytest.fixture
def script() -> Script:
    """Run a script in a process of its own; its exit code must be as expected (0)."""

    def run(
        text: str, *, code: int = 0, variables: dict[str, str] | None = None, **settings: object
    ) -> subprocess.CompletedProcess[str]:
        result = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(text)],
            env={**script_environment(**settings), **(variables or {})},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert result.returncode == code, (result.returncode, result.stdout, result.stderr)
        return result

    return run


class Background:
    """A script that runs beside the test: says a line when it is ready, ends when told to."""

    def __init__(self, text: str, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(text)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line == "ready\n", (line, self.process.communicate()[1])

    def kill(self) -> None:
        """End it as ``kill -9`` does."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def end(self) -> None:
        """Let it end by itself."""
        if self.process.returncode is None:
            self.process.communicate(input="")


@pytest.fixture
def background() -> Iterator[Callable[..., Background]]:
    """Start scripts that print "ready" and wait for their standard input to close."""
    started: list[Background] = []

    def start(text: str, **settings: object) -> Background:
        started.append(Background(text, script_environment(**settings)))
        return started[-1]

    yield start
    for each in started:
        each.end()


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    """The library of this process, with rbln:0 and rbln:1 open; faults are cleared afterwards."""
    runtime = Runtime()
    for device in range(2):
        assert runtime.register(device, device) == SUCCESS
    yield runtime
    simulator.clear_faults()
