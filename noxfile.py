# SPDX-License-Identifier: Apache-2.0
"""Everything one can do with this project; ``nox -l`` lists it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

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

#: Two cores are what the suite is made for; each worker is a simulated host of its own.
PYTEST = ("pytest", "-n", "2", "--dist", "worksteal")


#: Documents beside those in docs.
TEXTS = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")


def install_torch(session: nox.Session) -> None:
    """The vendor's PyTorch, from the configured index or PyTorch's own."""
    pip = ("python", "-m", "pip", "install", "--quiet", TORCH)
    try:
        session.run(*pip)
    except nox.command.CommandFailed:
        session.run(*pip, "--extra-index-url", PYTORCH_CPU_INDEX)


def install_stack(session: nox.Session, lmcache: str) -> None:
    """PyTorch, torch-rbln, LMCache, and this project with its test tools."""
    install_torch(session)
    session.install("--quiet", TORCH_RBLN, f"lmcache=={lmcache}")
    session.install("--quiet", "-e", ".", *group("test"))


def install_engine(session: nox.Session, lmcache: str = LMCACHE[-1]) -> None:
    """The stack with vLLM and vLLM-RBLN, which need no CUDA this way; about 4 GB."""
    install_stack(session, lmcache)
    folder = Path("tests/engine")
    session.install("--quiet", "--no-deps", "-r", str(folder / "requirements-no-deps.txt"))
    session.install("--quiet", "-r", str(folder / "requirements.txt"))


def group(name: str) -> list[str]:
    """A dependency group of pyproject.toml."""
    return nox.project.dependency_groups(PYPROJECT, name)


def own_requirements(session: nox.Session) -> list[str]:
    """What the wheel itself requires, pinned as installed; LMCache's own tree is LMCache's."""
    names = {
        re.split(r"[^A-Za-z0-9-]", text, maxsplit=1)[0]
        for text in PYPROJECT["project"]["dependencies"]
    } - {"lmcache"}
    frozen = str(session.run("python", "-m", "pip", "freeze", silent=True)).splitlines()
    return [line for line in frozen if line.split("==")[0].replace("_", "-") in names]


def tracked(session: nox.Session) -> list[str]:
    """Files under version control."""
    listed = session.run("git", "ls-files", external=True, silent=True)
    return str(listed).split()


@nox.session
@nox.parametrize("lmcache", LMCACHE)
def stub(session: nox.Session, lmcache: str) -> None:
    """On the simulated NPU: real LMCache, real torch-rbln, real lmcache server."""
    install_stack(session, lmcache)
    folders = ("tests/unit", "tests/stub", "tests/e2e", "tests/faults/test_sample.py")
    session.run(*PYTEST, *folders, *session.posargs)


@nox.session(name="next")
def next_lmcache(session: nox.Session) -> None:
    """The newest LMCache that is not supported yet: reported, never required."""
    install_torch(session)
    own = [text for text in PYPROJECT["project"]["dependencies"] if not text.startswith("lmcache")]
    session.install("--quiet", TORCH_RBLN, *own, *group("test"))
    # Without its requirements: the lane chooses LMCache.
    session.install("--quiet", "--no-deps", "-e", ".")
    session.run(
        "python", "-m", "tests.next", *(["--", *session.posargs] if session.posargs else [])
    )


@nox.session
def simulator(session: nox.Session) -> None:
    """The simulated RBLN runtime itself: streams, costs, faults, symbols, sanitizers."""
    install_stack(session, LMCACHE[-1])
    session.run(*PYTEST, "tests/simulator", *session.posargs)


@nox.session
def demo(session: nox.Session) -> None:
    """Store and retrieve through a real server for each layout, and compare every byte."""
    install_stack(session, LMCACHE[-1])
    session.run("lmcache-rbln", "demo", *session.posargs)


@nox.session
def engine(session: nox.Session) -> None:
    """vLLM-RBLN's real engine on the simulated NPU: right tokens, cold and from the cache."""
    install_engine(session)
    session.run(*PYTEST, "tests/engine", *session.posargs)


@nox.session
@nox.parametrize("lmcache", LMCACHE[:-1])
def engine_old(session: nox.Session, lmcache: str) -> None:
    """The engine with older releases of LMCache: every layout, cold and from the cache."""
    install_engine(session, lmcache)
    session.run(*PYTEST, "tests/engine/test_cache.py::test_every_layout", *session.posargs)


@nox.session
def serve(session: nox.Session) -> None:
    """Try it: a server, vLLM-RBLN's engine, two prompts, and what the cache saves."""
    install_engine(session)
    session.run("lmcache-rbln", "serve", *session.posargs)


@nox.session
def vllm(session: nox.Session) -> None:
    """vLLM's own scheduler and connectors without a model: every way a request can go."""
    install_engine(session)
    session.run("pytest", "-m", "vllm", "tests/vllm", *session.posargs)


@nox.session
def faults(session: nox.Session) -> None:
    """A fault at every call of the runtime; nothing may be lost or silently wrong."""
    install_stack(session, LMCACHE[-1])
    session.run("python", "-m", "tests.faults", *session.posargs)
    session.run("pytest", "tests/faults")


@nox.session
def bench(session: nox.Session) -> None:
    """Transfers against the link, the bundled backend and LMCache's pre-release."""
    install_stack(session, LMCACHE[-1])
    session.run("lmcache-rbln", "bench", *(session.posargs or ["--accept"]))


@nox.session(venv_backend="none")
def hardware(session: nox.Session) -> None:
    """On a host with an NPU, on the vendor's stack as it is there; fails without an NPU."""
    session.run("python", "-m", "tests.hardware", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Style, types, spelling, the stand-in's C++, workflows, dependencies, secrets."""
    install_stack(session, LMCACHE[-1])
    session.install("--quiet", *group("lint"))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("mypy")
    session.run("codespell", "src", "tests", "docs", ".github", "noxfile.py", *TEXTS)
    sources = sorted(map(str, Path("src").rglob("*.cpp"))) + sorted(
        map(str, Path("src").rglob("*.h"))
    )
    session.run("clang-format", "--dry-run", "--Werror", *sources)
    session.run("actionlint")
    # Advisories come from the package index; where it offers none, this says what it skipped.
    audited = Path(session.create_tmp()) / "audited.txt"
    audited.write_text("\n".join(own_requirements(session)) + "\n")
    session.run(
        "pip-audit", "--progress-spinner", "off", "--no-deps", "--disable-pip", "-r", str(audited)
    )  # fmt: skip
    session.run("detect-secrets-hook", *tracked(session))


@nox.session
def docs(session: nox.Session) -> None:
    """Links in the documents lead somewhere (those within the project; no network is asked)."""
    session.install("--quiet", *group("docs"))
    session.run("lychee", "--offline", "--no-progress", *TEXTS, "docs")


@nox.session
def build(session: nox.Session) -> None:
    """Source distribution and wheel, checked; the demo run from the wheel, in an empty place."""
    shutil.rmtree("dist", ignore_errors=True)
    session.install("--quiet", *group("build"))
    session.run("python", "-m", "build", "--outdir", "dist", silent=True)
    session.run("twine", "check", "--strict", *map(str, Path("dist").iterdir()))
    install_torch(session)
    session.install("--quiet", TORCH_RBLN, f"lmcache=={LMCACHE[-1]}")
    wheel = next(Path("dist").glob("*.whl")).resolve()
    before = session.run("python", "-m", "pip", "freeze", "--exclude", "lmcache-rbln", silent=True)
    session.install("--quiet", "--force-reinstall", "--no-deps", str(wheel))
    session.install("--quiet", str(wheel))
    with session.chdir(session.create_tmp()):
        session.run("lmcache-rbln", "demo")
    after = session.run("python", "-m", "pip", "freeze", "--exclude", "lmcache-rbln", silent=True)
    lost = set(str(before).splitlines()) - set(str(after).splitlines())
    if lost:
        session.error(f"installing the wheel changed other packages: {sorted(lost)}")


@nox.session
def release_notes(session: nox.Session) -> None:
    """The changelog's section of one version, into release-notes.md: -- 0.12.0"""
    version = session.posargs[0]
    found = re.search(
        rf"^## \[{re.escape(version)}\].*?\n(.*?)(?=^## \[|\Z)",
        Path("CHANGELOG.md").read_text(),
        re.M | re.S,
    )
    if found is None:
        session.error(f"CHANGELOG.md has no section [{version}]")
    Path("release-notes.md").write_text(found.group(1).strip() + "\n")
