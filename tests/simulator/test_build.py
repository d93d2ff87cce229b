# SPDX-License-Identifier: Apache-2.0
"""The library is compiled once, safely, or it is said why not.

Most of it is shown with a stand-in for the compiler: a script that writes a file.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from lmcache_rbln import simulator
from lmcache_rbln.simulator import _build


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "cache" / "of" / "its own"
    monkeypatch.setenv("LMCACHE_RBLN_CACHE", str(folder))
    return folder


@pytest.fixture
def fake_compiler(tmp_path, monkeypatch):
    """Put a script in the compiler's place; it notes each compilation in the file ``log``."""

    def make(action: str = 'echo library > "$out"', version: str = "1.0") -> Path:
        script = tmp_path / "fake compiler"
        script.write_text(
            "#!/bin/sh\n"
            f'if [ "$1" = --version ]; then echo {version}; exit; fi\n'
            f"echo compiled >> '{tmp_path}/log'\n"
            'for out in "$@"; do :; done\n'  # the last argument
            f"{action}\n"
        )
        script.chmod(0o755)
        monkeypatch.setenv("CXX", f"'{script}'")
        return tmp_path / "log"

    return make


def compilations(log: Path) -> int:
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_once(cache, fake_compiler):
    log = fake_compiler()
    path = simulator.build()
    assert path.name == "librbln.so"
    assert path.is_relative_to(cache)
    assert [each.name for each in path.parent.iterdir()] == ["librbln.so"]
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert simulator.build() == path
    assert compilations(log) == 1
    assert sorted(each.name for each in cache.iterdir()) == ["build.lock", path.parent.name]


def test_again_when_something_changed(cache, fake_compiler, monkeypatch):
    log = fake_compiler()
    paths = {simulator.build()}
    fake_compiler(version="2.0")
    paths.add(simulator.build())
    monkeypatch.setattr(_build, "FLAGS", (*_build.FLAGS, "-g"))
    paths.add(simulator.build())
    assert len(paths) == compilations(log) == 3


def test_again_when_a_header_changed(cache, fake_compiler, tmp_path):
    log = fake_compiler()
    source, header = tmp_path / "a.cpp", tmp_path / "a.h"
    for text in ("one", "two"):
        source.write_text("")
        header.write_text(text)
        _build.compile_once([], [source], "thing")
        _build.compile_once([], [source], "thing")
    assert compilations(log) == 2


def test_parallel_builds(cache, fake_compiler):
    log = fake_compiler(action='sleep 0.5; echo library > "$out"')
    command = [sys.executable, "-c", "from lmcache_rbln.simulator import build; print(build())"]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    paths = {process.communicate()[0] for process in processes}
    assert [process.returncode for process in processes] == [0] * 4
    assert paths == {f"{simulator.build()}\n"}
    assert compilations(log) == 1


def test_an_interrupted_build_leaves_no_library(cache, fake_compiler):
    fake_compiler(action='echo half > "$out"; kill -9 $PPID')
    command = [sys.executable, "-c", "from lmcache_rbln.simulator import build; build()"]
    assert subprocess.run(command, check=False, capture_output=True).returncode == -9
    assert not list(cache.glob("librbln-*"))
    log = fake_compiler()
    assert simulator.build().read_text() == "library\n"
    assert compilations(log) == 2


def test_no_compiler(cache, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(simulator.SimulatorError, match=r"C\+\+17 compiler.*install one .*CXX"):
        simulator.build()


def test_a_compiler_that_does_not_exist(cache, monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/g++ -m64")
    with pytest.raises(simulator.SimulatorError, match=r"found none \(CXX=/nowhere/g\+\+ -m64\)"):
        simulator.build()


def test_a_compiler_that_fails(cache, fake_compiler):
    fake_compiler(action="echo no such thing >&2; exit 3")
    with pytest.raises(simulator.SimulatorError, match=r"exit code 3.*\n.*no such thing"):
        simulator.build()
    assert sorted(each.name for each in cache.iterdir()) == ["build.lock"]


def test_a_compiler_that_makes_nothing(cache, fake_compiler):
    fake_compiler(action=":")
    with pytest.raises(simulator.SimulatorError, match=r"made no librbln\.so: is it a C\+\+ comp"):
        simulator.build()
    assert sorted(each.name for each in cache.iterdir()) == ["build.lock"]


def test_a_cache_that_loaders_would_cut(monkeypatch, tmp_path):
    monkeypatch.setenv("LMCACHE_RBLN_CACHE", str(tmp_path / "a:b"))
    with pytest.raises(simulator.SimulatorError, match="has a ':' in its name"):
        simulator.build()


def test_cache_folders(monkeypatch, tmp_path):
    monkeypatch.delenv("LMCACHE_RBLN_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert _build.cache_folder() == tmp_path / "xdg" / "lmcache-rbln"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert _build.cache_folder() == tmp_path / "home" / ".cache" / "lmcache-rbln"
    # As in a file of settings, where no shell puts the home folder in.
    monkeypatch.setenv("LMCACHE_RBLN_CACHE", "~/own")
    assert _build.cache_folder() == tmp_path / "home" / "own"


def test_a_cache_that_others_can_write_to(cache):
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    with pytest.raises(simulator.SimulatorError, match=r"can be written by others.*CACHE"):
        simulator.build()


def test_a_cache_that_cannot_be(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LMCACHE_RBLN_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(simulator.SimulatorError, match=r"cannot use the cache folder .*CACHE"):
        simulator.build()


def test_the_real_library(runtime):
    """The one in use: compiled here, without a warning from the compiler."""
    assert os.path.samefile(simulator.library_path(), simulator.build())
    flags = ["-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Wshadow", "-Werror"]
    warnings = subprocess.run(
        [*_build.compiler(), *flags, *map(str, sorted(_build.SOURCES.glob("*.cpp")))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (warnings.returncode, warnings.stderr) == (0, "")
