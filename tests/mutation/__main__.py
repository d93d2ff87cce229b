# SPDX-License-Identifier: Apache-2.0
"""Mutation testing of what moves bytes: does a test notice every wrong change?

Tests are collected once; each mutant then runs in a process forked from there, the code of its
functions put in the place of the module's own, until the first test that fails. Code outside
functions is not changed: it is mostly numbers that decide about speed, which no test may.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import resource
import signal
import sys
import time
import types
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.mutation.mutants import mutants

ROOT = Path(__file__).parents[2]

LAYOUT, PLAN = "tests/unit/test_kv_layout.py", "tests/unit/test_transfer_plan.py"
MOVES = "tests/stub/test_block_transfer.py"

#: Modules, and the tests that have to notice; the quickest first.
TESTS = {
    "kv_layout": (LAYOUT, PLAN),
    "transfer_plan": (PLAN,),
    "block_transfer": (MOVES,),
}

#: What only a process that forks, idles or ends shows: left alone.
LIFETIME = re.compile(r"block_transfer: (_Shared\.|_shared|_forget_after_fork|_close_at_exit)")

#: Tests of that start processes, in which a module is as it was.
SKIPPED = "not (start_methods or no_thread_is_left)"

#: Seconds, and seconds of CPU, after which a mutant counts as noticed: it waits, or loops.
TIMEOUT = 120
CPU_TIMEOUT = 20

#: Mutants that no test can notice, each after a comment that says why.
EQUIVALENT = Path(__file__).with_name("equivalent.txt")

#: The same examples each time; the first that fails is enough.
PROFILE = hypothesis.settings(
    derandomize=True,
    database=None,
    deadline=None,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)


def main() -> int:
    """Try all mutants; 1 if one survives that is not listed as equivalent, or is no more."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"of {', '.join(TESTS)}")
    parser.add_argument(
        "-k", dest="pattern", default="", help="only mutants in which this is found"
    )
    parser.add_argument("--tests", default=SKIPPED, help="only these tests, as for pytest -k")
    chosen = parser.parse_args()
    for name in chosen.modules:
        if name not in TESTS:
            parser.error(f"{name!r} is no module of {', '.join(TESTS)}")
    trial = Trial(chosen.modules or list(TESTS), re.compile(chosen.pattern))
    hypothesis.settings.register_profile("mutation", PROFILE)
    options = ("-q", "-s", "--tb=no", "-p", "no:cacheprovider", "--hypothesis-profile", "mutation")
    files = dict.fromkeys(file for name in trial.modules for file in TESTS[name])
    code = pytest.main([*options, "-k", chosen.tests, *files], plugins=[trial])
    return int(code) or bool(trial.problems)


class Trial:
    """A plugin of pytest that runs the tests once for each mutant."""

    def __init__(self, modules: Sequence[str], pattern: re.Pattern[str]) -> None:
        self.modules = modules
        self._pattern = pattern
        self.problems: list[str] = []

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        _warm_up()
        # Hypothesis imports it at the first failure: half a second in each process.
        with contextlib.suppress(ImportError):
            import_module("hypothesis.extra._patching")
        listed = [line for line in EQUIVALENT.read_text().splitlines() if line[:1] not in ("", "#")]
        for name in self.modules:
            items = sorted(
                (item for item in session.items if _file(item) in TESTS[name]),
                key=lambda item: TESTS[name].index(_file(item)),
            )
            self._try_module(session, name, items, listed)
        for line in self.problems:
            print(line)
        return True

    def _try_module(
        self, session: pytest.Session, name: str, items: list[pytest.Item], listed: list[str]
    ) -> None:
        module = import_module(f"lmcache_rbln.{name}")
        source = Path(str(module.__file__)).read_text()
        if _tried(session, items, module, source) != "survived":
            raise pytest.UsageError(f"the tests of {name} fail without any change")
        started = time.monotonic()
        made: set[str] = set()
        for mutant in mutants(source):
            line = f"{name}: {mutant.name}"
            made.add(line)
            if line in listed or LIFETIME.match(line) or not self._pattern.search(line):
                continue
            outcome = _tried(session, items, module, mutant.source)
            if outcome == "survived":
                self.problems.append(f"survived: {line}")
            seconds = time.monotonic() - started
            print(f"{outcome:8} {seconds:6.1f} s  {name}:{mutant.line} {mutant.name}", flush=True)
        self.problems += [
            f"listed as equivalent, and no mutant any more: {line}"
            for line in listed
            if line.startswith(f"{name}: ") and line not in made
        ]


@hypothesis.given(hypothesis.strategies.integers())
def _warm_up(number: int) -> None:
    """What hypothesis does once a process is done before the forks."""


def _file(item: pytest.Item) -> str:
    return item.path.relative_to(ROOT).as_posix()


def _tried(
    session: pytest.Session, items: list[pytest.Item], module: types.ModuleType, source: str
) -> str:
    """``survived``, ``noticed`` or ``hanging``."""
    child = os.fork()
    if not child:
        code = 2
        try:
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, 1)
            os.dup2(silent, 2)
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_TIMEOUT, CPU_TIMEOUT))
            _change(module, source)
            code = _run(session, items)
        finally:
            os._exit(code)
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return "noticed" if status else "survived"
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hanging"


def _run(session: pytest.Session, items: list[pytest.Item]) -> int:
    for item, following in zip(items, [*items[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.testsfailed:
            return 1
    return 0


def _change(module: types.ModuleType, source: str) -> None:
    """Put the code of another source in the place of the module's, whoever imported what of it."""
    namespace: dict[str, Any] = {"__name__": module.__name__, "__file__": "mutant"}
    exec(compile(source, "mutant", "exec"), namespace)
    _exchange(vars(module), namespace, module.__name__)


def _exchange(old: Any, new: dict[str, Any], module_name: str) -> None:
    for name, value in new.items():
        before = old.get(name)
        if isinstance(value, type) and value.__module__ == module_name:
            _exchange(vars(before), dict(vars(value)), module_name)
        else:
            function, other = _function(before), _function(value)
            if function and other and other.__code__.co_filename == "mutant":
                function.__code__ = other.__code__
                function.__defaults__ = other.__defaults__


def _function(value: object) -> types.FunctionType | None:
    """The function in a property, in a cached function, or itself."""
    value = value.fget if isinstance(value, property) else value
    value = getattr(value, "__wrapped__", value)
    return value if isinstance(value, types.FunctionType) else None


if __name__ == "__main__":
    sys.exit(main())
