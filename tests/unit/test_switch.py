# SPDX-License-Identifier: Apache-2.0
"""Settings that are on unless they are 0."""

from __future__ import annotations

import logging

import pytest

from lmcache_rbln import _switch


@pytest.mark.parametrize(("text", "expected"), [("", True), ("1", True), (" 0 ", False)])
def test_what_is_known(text: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMCACHE_RBLN_GUARD", text)
    assert _switch.is_on("LMCACHE_RBLN_GUARD") is expected
    monkeypatch.delenv("LMCACHE_RBLN_GUARD")
    assert _switch.is_on("LMCACHE_RBLN_GUARD")


def test_what_is_unknown_stays_on_and_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_switch, "_logger", lambda: logging.getLogger("test"))
    _switch._warn_once.cache_clear()
    monkeypatch.setenv("LMCACHE_RBLN_GUARD", "off")
    assert _switch.is_on("LMCACHE_RBLN_GUARD")
    assert _switch.is_on("LMCACHE_RBLN_GUARD")
    (said,) = caplog.messages
    assert said == (
        "LMCACHE_RBLN_GUARD='off' is unknown; expected 0 (off) or 1 (on, the default): it stays on"
    )
