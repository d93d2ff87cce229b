# SPDX-License-Identifier: Apache-2.0
"""The documents say what the source says, and their links lead somewhere."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_rbln.cli import _doctor_host, _doctor_server

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "lmcache_rbln"
DOCUMENTS = sorted([*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")])

#: What an environment variable's name looks like here.
VARIABLE = re.compile(
    r"_?(LMCACHE|RBLN|VLLM|TORCH|PYTHON|LD|XDG|PROMETHEUS)(_?[A-Z0-9]+)*|DEVICE_TYPE|CXX"
)
#: Names of formats and the like, and prefixes, which look like variables.
NOT_VARIABLES = {"LMCACHE_", "LMCACHE_RBLN_", "RBLN_"}


def variables() -> Iterator[str]:
    """The environment variables that the source names, each as a whole string."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                if VARIABLE.fullmatch(node.value) and node.value not in NOT_VARIABLES:
                    yield node.value
            elif isinstance(node, ast.keyword) and node.arg and VARIABLE.fullmatch(node.arg):
                yield node.arg
    for path in (SOURCE / "simulator" / "runtime").iterdir():
        yield from re.findall(r'"(RBLN_SIM_[A-Z_0-9]+)"', path.read_text())


def test_every_variable_is_in_the_settings_table() -> None:
    rows = [
        line for line in (ROOT / "docs" / "settings.md").read_text().splitlines() if line[:1] == "|"
    ]
    documented = {name for row in rows for name in re.findall(r"`([A-Z_0-9]+)`", row.split("|")[1])}
    found = set(variables())
    assert found - documented == set(), "docs/settings.md lacks these"
    # Read by LMCache and by Python, not by this package.
    assert documented - found - {"LMCACHE_LOG_LEVEL", "PYTHONHASHSEED"} == set(), "of no effect"


def test_defaults_in_the_settings_table() -> None:
    from lmcache_rbln import staging
    from lmcache_rbln.integration.vllm import settings

    text = (ROOT / "docs" / "settings.md").read_text()
    for row in (
        f"| `{staging.HOST_VARIABLE}` | whole MiB | {staging._HOST_CAP >> 20} |",
        f"| `{staging.DEVICE_VARIABLE}` | whole MiB, 0 for none | {staging._DEVICE_CAP >> 20} |",
        f"| `{settings.SERVER_VARIABLE}` | `tcp://HOST:PORT` | `{settings.DEFAULT_SERVER}` |",
    ):
        assert row in text


def test_doctor_knows_the_packages_own_settings() -> None:
    own = {name for name in variables() if name.startswith("LMCACHE_RBLN_")}
    assert own == set(_doctor_host.SETTINGS)


def test_every_touch_of_lmcache_is_in_the_architecture() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    touches = {path.name for path in (SOURCE / "lmcache_compat").glob("*.py")} - {"__init__.py"}
    assert {name for name in touches if f"`{name}`" not in text} == set()


def server_commands() -> Iterator[tuple[str, str]]:
    """Every command that starts a server, and where it stands; of doctor, its advice."""
    for path in DOCUMENTS:
        text = re.sub(r"\s*\\\n\s*", " ", path.read_text())
        yield from (
            (path.name, line) for line in re.findall(r".*lmcache server --(?!help).*", text)
        )
    server = _doctor_server.look("tcp://127.0.0.1:9", "")
    (check,) = _doctor_server.checks(server, {}, None)
    yield "doctor", check.next_step


def test_every_servers_command_has_what_it_needs() -> None:
    commands = list(server_commands())
    assert {"README.md", "vllm.md", "containers.md", "scale-out.md", "doctor"} <= {
        name for name, _ in commands
    }
    for name, command in commands:
        # Without the second LMCache 0.5.4 to 0.5.6 do not start.
        for flag in ("--chunk-size", "--eviction-policy", "--supported-transfer-mode"):
            assert flag in command, f"{name}: {command}"


def headings(path: Path) -> set[str]:
    """The anchors of a document, as code hosts make them of its headings."""
    found = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in found}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_within_the_repository(document: Path) -> None:
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (document.parent / file).resolve() if file else document
        assert path.exists(), f"{document.name} links to {target}"
        assert not anchor or anchor in headings(path), f"{document.name} links to {target}"


def test_the_readme_is_short_and_links_the_documents() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 200
    for document in (ROOT / "docs").glob("*.md"):
        assert f"docs/{document.name}" in text, f"README.md does not link docs/{document.name}"
