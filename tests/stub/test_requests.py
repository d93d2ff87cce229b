# SPDX-License-Identifier: Apache-2.0
"""A request in the words of each release's client; whichever is installed has the protocol."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_rbln.lmcache_compat import requests


def test_a_client_with_a_method_for_each_request() -> None:
    client = SimpleNamespace(ping=lambda *payload: ("pong", payload))
    assert requests.ask(SimpleNamespace(req_client=client), "ping", 7) == ("pong", (7,))


def test_a_message_queue_client() -> None:
    protocol = pytest.importorskip(
        "lmcache.v1.multiprocess.protocol", reason="only 0.5.4 has this client"
    )

    class Client:
        def submit_request(self, kind: Any, payload: list[Any], answer: Any) -> Any:
            return kind, payload, answer

    kind, payload, answer = requests.ask(SimpleNamespace(mq_client=Client()), "ping", 7)
    assert kind is protocol.RequestType.PING
    assert payload == [7]
    assert answer is protocol.get_response_class(kind)
