# SPDX-License-Identifier: Apache-2.0
"""Everything one can do with this project; ``nox -l`` lists it."""

from __future__ import annotations

import nox

nox.needs_version = ">=2024.4.15"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["stub"]

#: Releases of LMCache that every change is tested on.
LMCACHE = ("0.5.4", "0.5.5", "0.5.6")

#: torch-rbln 0.12.0 requires exactly this build.
TORCH = "torch==2.13.0+cpu"
TORCH_RBLN = "torch-rbln==0.12.0"

#: Where PyTorch publishes its CPU builds; asked only if the configured index has none.
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"

PYPROJECT = nox.project.load_toml("pyproject.toml")


def install_stack(session: nox.Session, lmcache: str) -> None:
    """The vendor's PyTorch, LMCache and this project with its test tools; no NPU software."""
    try:
        session.run("python", "-m", "pip", "install", "--quiet", TORCH)
    except nox.command.CommandFailed:
        session.run(
            "python", "-m", "pip", "install", "--quiet", TORCH, "--extra-index-url", PYTORCH_CPU_INDEX
        )  # fmt: skip
    session.install("--quiet", TORCH_RBLN, f"lmcache=={lmcache}")
    session.install("--quiet", "-e", ".", *nox.project.dependency_groups(PYPROJECT, "test"))


@nox.session
@nox.parametrize("lmcache", LMCACHE)
def stub(session: nox.Session, lmcache: str) -> None:
    """All tests on the simulated NPU: real LMCache, real torch-rbln, real lmcache server."""
    install_stack(session, lmcache)
    session.run(
        "pytest", "-n", "2", "--dist", "worksteal", "tests/unit", "tests/stub", "tests/e2e", *session.posargs
    )  # fmt: skip


@nox.session
def demo(session: nox.Session) -> None:
    """Store and retrieve through a real server for each layout, and compare every byte."""
    install_stack(session, LMCACHE[-1])
    session.run("lmcache-rbln", "demo", *session.posargs)
