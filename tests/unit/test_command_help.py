# SPDX-License-Identifier: Apache-2.0
"""The command explains itself: every command, every option."""

from __future__ import annotations

import argparse
import importlib

import pytest

from lmcache_rbln import __version__, cli


@pytest.fixture(scope="module")
def commands() -> dict[str, argparse.ArgumentParser]:
    subparsers = argparse.ArgumentParser().add_subparsers()
    for name in cli.COMMANDS:
        importlib.import_module(f"lmcache_rbln.cli.{name}").add_parser(subparsers)
    assert set(subparsers.choices) == set(cli.COMMANDS)
    summaries = {action.dest: action.help for action in subparsers._choices_actions}
    assert all(summaries.get(name) for name in cli.COMMANDS)
    return dict(subparsers.choices)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_option_is_explained(name: str, commands: dict[str, argparse.ArgumentParser]) -> None:
    parser = commands[name]
    assert parser.description
    silent = [
        action.dest
        for action in parser._actions
        if not action.help and action.nargs != argparse.REMAINDER
    ]
    assert silent == []


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in cli.COMMANDS)])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "\x1b[" not in text
    expected = cli.COMMANDS if len(arguments) == 1 else arguments[:1]
    assert all(name in text for name in expected)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"lmcache-rbln {__version__}\n"


def test_no_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert ended.value.code == 2
    assert "COMMAND" in capsys.readouterr().err
