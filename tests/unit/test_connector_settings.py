# SPDX-License-Identifier: Apache-2.0
"""The connector's configuration: kept as it is, or refused by name; nothing in between."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lmcache_rbln.integration.vllm import settings

KEYS = (
    settings.SERVER_URLS_KEY,
    settings.MODE_KEY,
    *settings._SERVER_KEYS,
    *settings._SECONDS_KEYS,
    *settings._FLAG_KEYS,
)

nonsense = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)


@given(key=st.sampled_from(KEYS), value=nonsense)
@example(key="lmcache.mp.mq_timeout", value=10**400)
@example(key="lmcache.mp.port", value="9" * 5000)
@example(key="lmcache.mp.server_urls", value=[["tcp://a:1"]])
def test_kept_or_refused_by_name(key: str, value: Any) -> None:
    given_config = {key: value, "other": 1}
    try:
        found = settings.with_server(given_config)
    except ValueError as refusal:
        assert key in str(refusal)
        assert repr(value) in str(refusal)
        assert "expected" in str(refusal)
        return
    assert found.pop("other") == 1
    if value and key in settings._SERVER_KEYS:
        assert found == {key: value}
    else:
        assert found.pop(settings.SERVER_URLS_KEY) == settings.DEFAULT_SERVER
        assert key == settings.SERVER_URLS_KEY or found == {key: value}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lmcache.mp.mq_timeout", 0.5),
        ("lmcache.mp.mq_timeout", "30"),
        ("lmcache.mp.heartbeat_interval", 10),
        ("lmcache.mp.eager_prefetch", True),
        ("lmcache.mp.mp_transfer_mode", "Engine_Driven"),
        ("lmcache.mp.server_urls", "tcp://a:1, tcp://b:2"),
        ("lmcache.mp.server_urls", "tcp://a:1,"),
        ("lmcache.mp.server_urls", ["a:1", "grpc://[::1]:2"]),
        ("lmcache.mp.host", "tcp://kv-host"),
        ("lmcache.mp.port", 6000),
        ("lmcache.mp.port", "6000"),
    ],
)
def test_kept(key: str, value: Any) -> None:
    assert settings.with_server({key: value})[key] == value


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lmcache.mp.mq_timeout", 0),
        ("lmcache.mp.mq_timeout", -1),
        ("lmcache.mp.mq_timeout", math.nan),
        ("lmcache.mp.mq_timeout", math.inf),
        ("lmcache.mp.mq_timeout", True),
        ("lmcache.mp.heartbeat_interval", "soon"),
        ("lmcache.mp.eager_prefetch", "false"),
        ("lmcache.mp.lazy_offload", 1),
        ("lmcache.mp.mp_transfer_mode", "engine-driven"),
        ("lmcache.mp.server_urls", 5555),
        ("lmcache.mp.server_urls", "kv-host"),
        ("lmcache.mp.server_urls", " ,"),
        ("lmcache.mp.server_urls", ["tcp://a:1", 2]),
        ("lmcache.mp.host", "two words"),
        ("lmcache.mp.port", 65536),
        ("lmcache.mp.port", "http"),
        ("lmcache.mp.port", True),
    ],
)
def test_refused(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=key):
        settings.with_server({key: value})


def test_a_named_server_is_kept_and_an_empty_one_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.SERVER_VARIABLE, "other:7000")
    named = {settings.SERVER_URLS_KEY: "kv-host:5555", "more": 1}
    assert settings.with_server(named) == named
    assert settings.with_server({settings.SERVER_URLS_KEY: ""}) == {
        settings.SERVER_URLS_KEY: "other:7000"
    }
