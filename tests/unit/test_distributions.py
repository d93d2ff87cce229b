# SPDX-License-Identifier: Apache-2.0
"""What is published: sdist and wheel can be built, and hold what they must and no more."""

from __future__ import annotations

import ast
import email
import itertools
import re
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from lmcache_rbln import __version__
from lmcache_rbln.lmcache_compat import versions

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "lmcache_rbln"
NAME = f"lmcache_rbln-{__version__}"

#: What the package is made of: Python, and the stand-in's C++, which is compiled where it is used.
SUFFIXES = {".py", ".cpp", ".h"}

METADATA = {
    f"{NAME}.dist-info/{name}"
    for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
}

#: Beside src, tests and docs.
SDIST_FILES = {
    ".gitignore",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "PKG-INFO",
    "README.md",
    "noxfile.py",
    "pyproject.toml",
}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both distributions, built by the backend that pyproject.toml names."""
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(dist / f"{NAME}-py3-none-any.whl")


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    return email.message_from_bytes(wheel.read(f"{NAME}.dist-info/METADATA"))


def test_two_distributions(dist: Path) -> None:
    assert {path.name for path in dist.iterdir()} == {
        f"{NAME}-py3-none-any.whl",
        f"{NAME}.tar.gz",
    }


def test_the_wheel_holds_the_package_and_its_metadata(wheel: zipfile.ZipFile) -> None:
    package = {
        path.relative_to(SOURCE.parent).as_posix()
        for path in SOURCE.rglob("*")
        if path.suffix in SUFFIXES
    }
    assert set(wheel.namelist()) == package | METADATA


@pytest.mark.parametrize(
    "name",
    [
        "device_spec.py",
        "integration/vllm/connector.py",
        "cli/__main__.py",
        "simulator/runtime/runtime.cpp",
        "simulator/runtime/abi.h",
        "simulator/engine/site/rebel/__init__.py",
    ],
)
def test_what_is_found_only_at_run_time_is_there(name: str, wheel: zipfile.ZipFile) -> None:
    assert f"lmcache_rbln/{name}" in wheel.namelist()


def test_the_wheel_is_for_every_platform(wheel: zipfile.ZipFile) -> None:
    text = wheel.read(f"{NAME}.dist-info/WHEEL").decode()
    assert "Root-Is-Purelib: true" in text
    assert re.findall("^Tag: (.*)$", text, re.M) == ["py3-none-any"]


def test_the_wheel_has_no_test_and_is_small(wheel: zipfile.ZipFile) -> None:
    assert {name.split("/")[0] for name in wheel.namelist()} == {
        "lmcache_rbln",
        f"{NAME}.dist-info",
    }
    assert sum(item.file_size for item in wheel.infolist()) < 2 << 20


def test_entry_points(wheel: zipfile.ZipFile) -> None:
    text = wheel.read(f"{NAME}.dist-info/entry_points.txt").decode()
    sections = dict(re.findall(r"\[(.+)\]\n(.+)", text))
    spec = "rbln = lmcache_rbln.device_spec:RblnDeviceSpec"
    assert sections == {
        "console_scripts": "lmcache-rbln = lmcache_rbln.cli:main",
        "lmcache.device_backends": spec,
        "lmcache.device_plugins": spec,
    }


def test_requirements(metadata: Message) -> None:
    wanted = list(map(Requirement, metadata.get_all("Requires-Dist", [])))
    hard = {item.name: item.specifier for item in wanted if item.marker is None}
    assert set(hard) == {"importlib-metadata", "lmcache", "numpy", "rich", "wrapt"}
    low, high = versions.SUPPORTED
    assert hard["lmcache"] == SpecifierSet(f">={low},<{high}")
    assert all(version in hard["lmcache"] for version in versions.TESTED)
    # Everything of the vendor's comes only by an extra of its name.
    assert {(item.name, str(item.marker)) for item in wanted if item.marker} == {
        (name, f'extra == "{name}"') for name in ("torch", "torch-rbln", "vllm-rbln")
    }


def test_pythons(metadata: Message) -> None:
    supported = SpecifierSet(metadata["Requires-Python"])
    minors = [minor for minor in range(6, 20) if f"3.{minor}" in supported]
    named = re.findall(r"Python :: 3\.(\d+)", "\n".join(metadata.get_all("Classifier", [])))
    assert minors == list(map(int, named)) == [10, 11, 12, 13]


def test_the_sdist_holds_the_sources(dist: Path) -> None:
    with tarfile.open(dist / f"{NAME}.tar.gz") as archive:
        names = {name.removeprefix(f"{NAME}/") for name in archive.getnames()}
    top = {name for name in names if name.split("/")[0] not in ("src", "tests", "docs")}
    assert top == SDIST_FILES
    for folder in ("src", "tests", "docs"):
        there = {
            path.relative_to(ROOT).as_posix()
            for path in (ROOT / folder).rglob("*")
            if path.is_file() and not {"__pycache__"} & set(path.parts)
        }
        assert {name for name in names if name.startswith(f"{folder}/")} == there


class TestEverywhereTheSame:
    """The releases of LMCache and of Python that are tested, wherever they are named."""

    @pytest.fixture(scope="class")
    def workflow(self) -> str:
        return (ROOT / ".github" / "workflows" / "stub.yml").read_text()

    def matrix(self, workflow: str, name: str) -> list[str]:
        (found,) = re.findall(rf"^ +{name}: (\[.*\])$", workflow, re.M)
        return list(ast.literal_eval(found))

    def test_nox(self) -> None:
        tree = ast.parse((ROOT / "noxfile.py").read_text())
        (named,) = (
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LMCACHE"
        )
        assert named == versions.TESTED

    def test_workflow(self, workflow: str) -> None:
        assert self.matrix(workflow, "lmcache") == list(versions.TESTED)
        assert self.matrix(workflow, "python") == ["3.10", "3.11", "3.12", "3.13"]

    def test_workflows_run_sessions_and_nothing_else(self) -> None:
        tree = ast.parse((ROOT / "noxfile.py").read_text())
        sessions = {
            re.sub("_lmcache$", "", node.name)
            for node in tree.body
            if isinstance(node, ast.FunctionDef) and "nox.session" in ast.unparse(node)
        }
        page = (ROOT / "docs" / "hardware-validation.md").read_text()
        ran = set()
        for path in (ROOT / ".github" / "workflows").glob("*.yml"):
            text = path.read_text()
            listed = re.findall(r"^ +session: \[(.*)\]$", text, re.M)
            for command in re.findall(r"run: (.+)$", text, re.M):
                if nox := re.fullmatch(r"nox -s ([^-]+?)( -- .*)?", command):
                    named = " ".join(listed) if "matrix.session" in nox[1] else nox[1]
                    found = set(re.findall(r"[a-z_]+", re.sub(r"\(.*\)", "", named)))
                    assert found <= sessions, f"{path.name}: {command}"
                    ran |= found
                elif path.name == "hardware.yml":
                    assert command in page, "docs/hardware-validation.md says it otherwise"
                elif not command.startswith("gh release create"):
                    assert command == "pip install nox", f"{path.name}: {command}"
            if re.search(r"nox -s (?!hardware)", text):
                assert "PIP_EXTRA_INDEX_URL: ${{ vars.PYTORCH_CPU_INDEX }}" in text, path.name
        lanes = {"stub", "simulator", "engine", "vllm", "faults", "next", "hardware"}
        assert ran >= lanes | {"lint", "docs", "build", "release_notes"}

    def test_readme(self) -> None:
        text = (ROOT / "README.md").read_text()
        assert all(version in text for version in (versions.TESTED[0], versions.TESTED[-1]))

    def test_changelog(self) -> None:
        """The version has a section, under one for what comes next."""
        text = (ROOT / "CHANGELOG.md").read_text()
        headings = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", text, re.M)
        assert headings[:2] == [("Unreleased", ""), (__version__, headings[1][1])]
        assert all(date for _, date in headings[1:])
        for earlier, later in itertools.pairwise(reversed(headings[1:])):
            assert earlier[1] <= later[1]
        kinds = set(re.findall(r"^### (.+)$", text, re.M))
        assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
