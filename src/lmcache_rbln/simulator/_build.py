# SPDX-License-Identifier: Apache-2.0
"""Compiles the stand-in for ``librbln.so``, once for each source, compiler and set of flags."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lmcache_rbln.simulator._errors import SimulatorError

#: The stand-in's C++ sources, shipped with the package.
SOURCES = Path(__file__).with_name("runtime")

#: The name under which torch-rbln looks for the runtime.
LIBRARY = "librbln.so"

FLAGS = (
    "-std=c++17",
    "-O2",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    # torch's wheels are built with it; std::string and std::map cross the library's boundary.
    "-D_GLIBCXX_USE_CXX11_ABI=1",
    "-shared",
    f"-Wl,-soname,{LIBRARY}",
    "-Wl,-z,defs",
)


def compiler() -> list[str]:
    """The C++ compiler's command: ``$CXX`` if set, else the first of c++, g++, clang++.

    Raises:
        SimulatorError: There is none, or ``CXX`` is no command.
    """
    try:
        named = shlex.split(os.environ.get("CXX", ""))
    except ValueError as exc:
        raise SimulatorError(
            f"CXX={os.environ['CXX']!r} is no command ({exc}); expected a C++ compiler such as g++, "
            "or leave it unset"
        ) from exc
    for command in [named] if named else [["c++"], ["g++"], ["clang++"]]:
        if found := shutil.which(command[0]):
            return [found, *command[1:]]
    looked_for = f"CXX={os.environ['CXX']}" if named else "c++, g++ or clang++"
    raise SimulatorError(
        f"the simulated NPU needs a C++17 compiler and found none ({looked_for}); install one "
        "(Debian and Ubuntu: apt install g++) or name it in CXX"
    )


def cache_folder() -> Path:
    """Where compiled libraries are kept; made, for its user alone, if it does not exist.

    ``$LMCACHE_RBLN_CACHE``, else ``$XDG_CACHE_HOME/lmcache-rbln``, else
    ``~/.cache/lmcache-rbln``.

    Raises:
        SimulatorError: It cannot be made, or belongs to somebody else.
    """
    if own := os.environ.get("LMCACHE_RBLN_CACHE"):
        folder = Path(own).expanduser()
    elif shared := os.environ.get("XDG_CACHE_HOME"):
        folder = Path(shared) / "lmcache-rbln"
    else:
        folder = Path.home() / ".cache" / "lmcache-rbln"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise SimulatorError(
            f"cannot use the cache folder {folder}: {error}; name another in LMCACHE_RBLN_CACHE"
        ) from error
    if os.pathsep in str(folder):
        raise SimulatorError(
            f"the cache folder {folder} has a {os.pathsep!r} in its name, at which loaders cut their "
            "path; name another in LMCACHE_RBLN_CACHE"
        )
    # What is in it gets loaded into processes.
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise SimulatorError(
            f"the cache folder {folder} belongs to or can be written by others; name another in "
            "LMCACHE_RBLN_CACHE"
        )
    return folder.resolve()


def build() -> Path:
    """Compiles the stand-in unless that was done before.

    Returns:
        The library's absolute path; its folder holds nothing else.

    Raises:
        SimulatorError: No compiler, no usable cache folder, or the compiler failed.
    """
    return compile_once(FLAGS, sorted(SOURCES.glob("*.cpp")), LIBRARY)


def compile_once(flags: Sequence[str], sources: Sequence[Path], product: str) -> Path:
    """Compiles ``sources`` into a file of the cache, unless it is there.

    Args:
        flags: For the compiler, before the sources.
        sources: C++ files; the headers beside them count as sources too.
        product: Name of the file to make.

    Returns:
        The file's absolute path, in a folder of its own: named after all that it depends on.

    Raises:
        SimulatorError: No compiler, no usable cache folder, or the compiler failed.
    """
    command = compiler()
    cache = cache_folder()
    folder = cache / f"{Path(product).stem}-{_fingerprint(command, flags, sources)}"
    if not (folder / product).exists():
        with _one_at_a_time(cache):
            if not (folder / product).exists():
                _compile(command, [*flags, *map(str, sources)], folder, product)
    return folder / product


def _fingerprint(command: Sequence[str], flags: Sequence[str], sources: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for part in (*command, _run([*command, "--version"]).stdout, *flags):
        digest.update(part.encode() + b"\0")
    headers = {header for source in sources for header in source.parent.glob("*.h")}
    for source in (*sources, *sorted(headers)):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:20]


@contextmanager
def _one_at_a_time(cache: Path) -> Iterator[None]:
    """Parallel test workers wait for one compilation instead of each doing it."""
    with open(cache / "build.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compile(command: list[str], arguments: list[str], folder: Path, product: str) -> None:
    # Renamed into place when complete: nobody ever sees half a file.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="building-") as work:
        fresh = Path(work) / "out"
        fresh.mkdir(mode=0o700)
        result = _run([*command, *arguments, "-o", str(fresh / product)])
        if result.returncode != 0:
            raise SimulatorError(
                f"compiling the simulated NPU failed ({shlex.join(command)}, exit code "
                f"{result.returncode}):\n{result.stderr.strip()}"
            )
        if not (fresh / product).is_file():
            raise SimulatorError(
                f"{shlex.join(command)} ended well and made no {product}: is it a C++ compiler? "
                "Name one in CXX"
            )
        try:
            fresh.rename(folder)
        except OSError:
            # Another machine on a shared home may have been faster; its file is the same.
            if not (folder / product).exists():
                raise


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise SimulatorError(f"cannot run the C++ compiler {command[0]}: {error}") from error
