# SPDX-License-Identifier: Apache-2.0
"""Everything one can do with this project; ``nox -l`` lists it."""

from __future__ import annotations

import json
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

PYPROJECT = nox.project.load_toml("pyproject.toml")

#: The tests of the stub lane.
STUB = (
    "tests/unit",
    "tests/stub",
    "tests/e2e",
    "tests/faults/test_sample.py",
    "tests/faults/test_server_guard.py",
)

#: An argument of the lanes that ``run_tests``.
SECOND_CHANCE = "--second-chance"

#: Documents beside those in docs.
TEXTS = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")


def run_tests(
    session: nox.Session, *arguments: str, under: tuple[str, ...] = (), parallel: bool = True
) -> None:
    """Run tests; after ``--second-chance``, those that failed once more.

    Real servers, workers and time-outs on a shared machine can fail by chance; a defect fails twice.
    """
    # Of each session its own: what failed in one may have passed in another.
    cache = Path(session.virtualenv.location).resolve() / "pytest_cache"
    given = [argument for argument in session.posargs if argument != SECOND_CHANCE]
    # Two cores are what the suite is made for; each worker is a simulated host of its own.
    workers = ("-n", "2", "--dist", "worksteal") if parallel else ()
    command = (*under, "pytest", *workers, "-o", f"cache_dir={cache}", *arguments, *given)
    try:
        session.run(*command)
    except nox.command.CommandFailed:
        if SECOND_CHANCE not in session.posargs:
            raise
        session.warn("tests failed; those that did run once more")
        session.run(*command, "--last-failed")


def install_torch(session: nox.Session, python: str = "python") -> None:
    """The vendor's PyTorch, from an index that pip is configured for."""
    try:
        session.run(python, "-m", "pip", "install", "--quiet", TORCH, external=True)
    except nox.command.CommandFailed:
        session.error(
            f"{TORCH} could not be installed; if pip's index has no CPU builds of PyTorch, give "
            "PyTorch's own index of them in PIP_EXTRA_INDEX_URL"
        )


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


def audit(session: nox.Session) -> None:
    """Fail on a known vulnerability of a requirement; name each that could not be looked up.

    Advisories come from the package index, and not every index has them.
    """
    folder = Path(session.create_tmp())
    requirements, found = folder / "audited.txt", folder / "audit.json"
    requirements.write_text("\n".join(own_requirements(session)) + "\n")
    found.unlink(missing_ok=True)
    session.run(
        "pip-audit", "--progress-spinner", "off", "--no-deps", "--disable-pip",
        "--format", "json", "--output", str(found), "--requirement", str(requirements),
        success_codes=[0, 1],
    )  # fmt: skip
    if not found.exists():
        session.error("pip-audit could not do its work; see above")
    packages = json.loads(found.read_text())["dependencies"]
    for package in packages:
        if "skip_reason" in package:
            session.warn(f"NOT AUDITED: {package['name']}: {package['skip_reason']}")
    vulnerable = [
        f"{package['name']} {package['version']}: {vulnerability['id']}, fixed in "
        f"{', '.join(vulnerability['fix_versions']) or 'no release'}"
        for package in packages
        for vulnerability in package.get("vulns", ())
    ]
    if vulnerable:
        session.error("known vulnerabilities: " + "; ".join(vulnerable))
    audited = sum("skip_reason" not in package for package in packages)
    session.log(f"{audited} of {len(packages)} requirements audited")


def tracked(session: nox.Session) -> list[str]:
    """Files under version control."""
    listed = session.run("git", "ls-files", external=True, silent=True)
    return str(listed).split()


@nox.session
@nox.parametrize("lmcache", LMCACHE)
def stub(session: nox.Session, lmcache: str) -> None:
    """On the simulated NPU: real LMCache, real torch-rbln, real lmcache server."""
    install_stack(session, lmcache)
    run_tests(session, *STUB)


@nox.session
def coverage(session: nox.Session) -> None:
    """Lines of the package that the stub and simulator lanes run, in every process."""
    install_stack(session, LMCACHE[-1])
    session.run("coverage", "erase")
    run_tests(session, *STUB, "tests/simulator", under=("coverage", "run", "-m"))
    session.run("coverage", "combine", "--quiet")
    session.run("coverage", "report")


@nox.session
def mutation(session: nox.Session) -> None:
    """Does a test notice every wrong change to what moves bytes? -- MODULE for one of them."""
    install_stack(session, LMCACHE[-1])
    session.run("python", "-m", "tests.mutation", *session.posargs)


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
    run_tests(session, "tests/simulator")


@nox.session
def demo(session: nox.Session) -> None:
    """Store and retrieve through a real server for each layout, and compare every byte."""
    install_stack(session, LMCACHE[-1])
    session.run("lmcache-rbln", "demo", *session.posargs)


@nox.session
def engine(session: nox.Session) -> None:
    """vLLM-RBLN's real engine on the simulated NPU: right tokens, cold and from the cache."""
    install_engine(session)
    run_tests(session, "tests/engine")


@nox.session
@nox.parametrize("lmcache", LMCACHE[:-1])
def engine_old(session: nox.Session, lmcache: str) -> None:
    """The engine with older releases of LMCache: every layout, cold and from the cache."""
    install_engine(session, lmcache)
    run_tests(session, "tests/engine/test_cache.py::test_every_layout")


@nox.session
def serve(session: nox.Session) -> None:
    """Try it: a server, vLLM-RBLN's engine, two prompts, and what the cache saves."""
    install_engine(session)
    session.run("lmcache-rbln", "serve", *session.posargs)


@nox.session
def vllm(session: nox.Session) -> None:
    """vLLM's own scheduler and connectors without a model: every way a request can go."""
    install_engine(session)
    run_tests(session, "-m", "vllm", "tests/vllm", parallel=False)


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
    audit(session)
    session.run("detect-secrets-hook", *tracked(session), log=False)


@nox.session
def docs(session: nox.Session) -> None:
    """Links in the documents lead somewhere (those within the project; no network is asked)."""
    session.install("--quiet", *group("docs"))
    session.run("lychee", "--offline", "--no-progress", *TEXTS, "docs")


#: The backend that LMCache selects, by module and class.
SELECTED = """
from lmcache.v1.platform import current_device_spec as spec
print("SELECTED", type(spec).__module__, spec.backend_name)
"""


@nox.session
def build(session: nox.Session) -> None:
    """Source distribution and wheel, checked; installed, tried and removed in an empty place."""
    session.install("--quiet", *group("build"))
    shutil.rmtree("dist", ignore_errors=True)
    session.run("python", "-m", "build", "--outdir", "dist", silent=True)
    session.run("twine", "check", "--strict", *map(str, Path("dist").iterdir()))
    (wheel,) = Path("dist").resolve().glob("*.whl")

    place = Path(session.create_tmp()).resolve() / "empty"
    session.run("python", "-m", "venv", "--clear", str(place))
    python = str(place / "bin" / "python")

    def run(*arguments: str, **options: object) -> str:
        return str(session.run(python, *arguments, external=True, **options))

    def packages() -> set[str]:
        frozen = run("-m", "pip", "freeze", "--all", silent=True, log=False)
        return {line for line in frozen.splitlines() if not line.startswith("lmcache-rbln ")}

    install_torch(session, python)
    run("-m", "pip", "install", "--quiet", TORCH_RBLN, f"lmcache=={LMCACHE[-1]}")
    before = packages()
    run("-m", "pip", "install", "--quiet", str(wheel))
    if changed := before - packages():
        session.error(f"installing the wheel changed other packages: {sorted(changed)}")

    with session.chdir(place):
        run("-m", "lmcache_rbln.cli", "demo")
        # The simulated runtime stays where it was compiled, and needs nothing of the package.
        where = (
            "from lmcache_rbln import simulator; print(simulator.environment()['LD_LIBRARY_PATH'])"
        )
        env = {
            "LD_LIBRARY_PATH": run("-c", where, silent=True, log=False).splitlines()[-1],
            "LMCACHE_TRACK_USAGE": "false",
        }

        def selected() -> str:
            said = run("-c", SELECTED, env=env, silent=True, log=False)
            return next(line for line in said.splitlines() if line.startswith("SELECTED "))

        if not (found := selected()).startswith("SELECTED lmcache_rbln."):
            session.error(f"with the wheel installed, LMCache's backend is not its own: {found}")
        run("-m", "pip", "uninstall", "--quiet", "--yes", "lmcache-rbln")
        if not re.fullmatch(r"SELECTED lmcache\.v1\.platform\.\S*rbln rbln", found := selected()):
            session.error(f"without the wheel, LMCache's bundled backend is not back: {found}")
    if (place / "bin" / "lmcache-rbln").exists() or list(place.rglob("lmcache_rbln*")):
        session.error("uninstalling the wheel left files behind")
    session.log(f"{wheel.name}: installed, tried and removed; nothing else was changed")


@nox.session
def release_notes(session: nox.Session) -> None:
    """The changelog's section of one version, into release-notes.md: -- 0.12.0"""
    version = PYPROJECT["project"]["version"]
    if session.posargs != [version]:
        session.error(f"asked for {session.posargs}, but pyproject.toml has version {version}")
    found = re.search(
        rf"^## \[{re.escape(version)}\].*?\n(.*?)(?=^## \[|\Z)",
        Path("CHANGELOG.md").read_text(),
        re.M | re.S,
    )
    if found is None:
        session.error(f"CHANGELOG.md has no section [{version}]")
    Path("release-notes.md").write_text(found.group(1).strip() + "\n")
