# SPDX-License-Identifier: Apache-2.0
"""docs/troubleshooting.md knows every message with which the package refuses or warns.

The messages are read from the source: what is raised, what is logged as a warning or an error, and
the reasons for which there is no NPU. A row of the document holds such a message, with ``…`` for
what changes from case to case, and for what is too long to repeat.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "lmcache_rbln"
DOCUMENT = ROOT / "docs" / "troubleshooting.md"

#: Raised by Python's own rules, to end the process, for argparse, which says what is wrong itself, or
#: for a touch of LMCache, which warns in words of its own and steps aside.
NOT_FOR_USERS = {
    "ChangedError",
    "ArgumentTypeError",
    "AssertionError",
    "AttributeError",
    "NotImplementedError",
    "SystemExit",
}

#: Functions that make an exception, and what they add to their argument.
MAKERS = {"not_modelled": " is not modelled by the simulated RBLN compiler"}

#: Functions whose returned text is raised or logged elsewhere.
SPEAKERS = {"_verdict"}

#: Where a text is only handed on: a worker's or the simulated runtime's own words.
HANDED_ON = {"cli/_worker_process.py", "self_check.py", "simulator/_library.py"}


@dataclass(frozen=True)
class Message:
    """A message of the package, with ``…`` for what changes, and where it is written."""

    text: str
    where: str

    @property
    def row(self) -> str:
        """The row that the document lacks."""
        return f"| `{self.text}` | what it means | what to do |  ({self.where})"


def template(node: ast.expr, names: dict[str, str]) -> str:
    """The text of an expression, with ``…`` for what is not known before it runs."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        # What %-formatting fills in.
        return re.sub(r"%[-+ 0-9.]*[a-z]", "…", node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part, names) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return template(node.value, names)
    if isinstance(node, ast.Name):
        return names.get(node.id, "…")
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left, names) + template(node.right, names)
    if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in MAKERS:
        name = ast.unparse(node.func).rpartition(".")[2]
        return template(node.args[0], names) + MAKERS[name]
    if isinstance(node, ast.Call) and len(node.args) == 1:
        # A function that adds something to the text.
        return f"…{template(node.args[0], names)}…"
    return "…"


def normal(text: str) -> str:
    """One line, single spaces, one ``…`` for several."""
    return re.sub(r"…(\s*…)+", "…", " ".join(text.split())).strip()


def said(tree: ast.AST) -> Iterator[tuple[ast.expr, int]]:
    """The expression of each message in a module, and its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            call = node.exc
            kind = ast.unparse(call.func).rpartition(".")[2]
            # A private exception is caught within its module.
            if kind in NOT_FOR_USERS or re.match("_[A-Z]", kind) or not call.args:
                continue
            yield (call if kind in MAKERS else call.args[0]), node.lineno
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if re.fullmatch(r"(_?logger|init_logger)(\(.*\))?\.(warning|error)|_unavailable", name):
                yield node.args[0], node.lineno
            elif name == "_say" and ast.unparse(node.args[0]) in ("'warning'", "'error'"):
                yield node.args[1], node.lineno
        elif isinstance(node, ast.FunctionDef) and node.name in SPEAKERS:
            for part in ast.walk(node):
                if isinstance(part, ast.Return) and part.value is not None:
                    yield part.value, part.lineno


@functools.cache
def messages() -> tuple[Message, ...]:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        names = {
            target.id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for expression, line in said(tree):
            text = normal(template(expression, names))
            if re.search(r"\w", text) or str(path.relative_to(SOURCE)) not in HANDED_ON:
                found.append(Message(text, f"{path.relative_to(ROOT)}:{line}"))
    return tuple(found)


@functools.cache
def rows() -> tuple[str, ...]:
    """The first column of every table whose first heading is ``message``."""
    found = []
    listing = False
    for line in DOCUMENT.read_text().splitlines():
        if not line.startswith("|"):
            listing = False
        elif line.startswith("| message | "):
            listing = True
        elif listing and not line.startswith("|---"):
            match = re.match(r"\| `(.+?)` \| \S.* \| \S.* \|$", line)
            assert match, f"not a row of three filled columns, the first in backticks: {line}"
            found.append(normal(match[1].replace("\\|", "|")))
    return tuple(found)


def fits(row: str, message: str) -> bool:
    """Whether a row is this message, with ``…`` for any part of it."""
    pattern = "(?:.*)".join(map(re.escape, row.split("…")))
    return re.fullmatch(pattern, message, re.DOTALL) is not None


def test_every_message_has_one_row() -> None:
    missing = [m.row for m in messages() if not any(fits(row, m.text) for row in rows())]
    assert not missing, "docs/troubleshooting.md lacks:\n" + "\n".join(missing)


def test_every_row_has_a_message() -> None:
    stale = [row for row in rows() if not any(fits(row, m.text) for m in messages())]
    assert not stale, "no code says this any more; docs/troubleshooting.md:\n" + "\n".join(stale)


def test_no_row_twice() -> None:
    assert len(set(rows())) == len(rows())


def test_no_row_is_so_short_that_it_fits_everything() -> None:
    assert [row for row in rows() if len(row.replace("…", "").strip()) < 12] == []


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("raise ValueError(f'{NAME}={x!r} is' + ' unknown')", "LAYOUT=… is unknown"),
        ("raise ValueError('a  %d of %.1f' % (1, 2))", "…"),
        ("logger.warning('%d of\\n%s', 1, 2)", "… of …"),
        ("raise TypeError('x' f'{a}{b}')", "x…"),
        ("raise pkg.Broken(f'{a}: {b}')", "…: …"),
        (
            "raise not_modelled(f'{a} of b')",
            "… of b is not modelled by the simulated RBLN compiler",
        ),
    ],
)
def test_templates(code: str, expected: str) -> None:
    [(expression, _)] = said(ast.parse(code))
    assert normal(template(expression, {"NAME": "LAYOUT"})) == expected


def test_what_is_not_for_users_is_left_out() -> None:
    code = "raise _Changed('x')\nraise SystemExit(1)\nraise\nraise error\nraise KeyError"
    assert list(said(ast.parse(code))) == []
