# SPDX-License-Identifier: Apache-2.0
"""A request to an LMCache server, the same for three releases.

What: the request client of 0.5.5 and 0.5.6, one method a request; and the message-queue client of
0.5.4, to which requests are members of an enumeration.
Why: guard and connector ask what LMCache's own code does not.
Versions: 0.5.4, 0.5.5, 0.5.6.
Obsolete: the second way, once 0.5.4 is no longer supported.
"""

from __future__ import annotations

from typing import Any

#: Takes an engine-driven registration back. For a worker that has none it changes nothing, and only
#: a server with that transfer mode answers it: the one way to ask whether it has.
UNREGISTER = "unregister_kv_cache_engine_driven_context"


def ask(holder: Any, name: str, *payload: Any) -> Any:
    """LMCache's future of a request.

    Args:
        holder: An object of LMCache's that has a client: a worker's adapter, a transfer context.
        name: The request in lower case, as in ``commit_store``.
        payload: What it takes.
    """
    client = getattr(holder, "req_client", None)
    if client is not None:
        return getattr(client, name)(*payload)
    return submit(holder.mq_client, name, *payload)


def submit(client: Any, name: str, *payload: Any) -> Any:
    """The same, with a message-queue client of 0.5.4."""
    from lmcache.v1.multiprocess.protocol import RequestType

    return send(client, RequestType[name.upper()], list(payload))


def send(client: Any, kind: Any, payload: list[Any]) -> Any:
    """The same, in the form in which 0.5.4's contexts want to be given it."""
    from lmcache.v1.multiprocess.protocol import get_response_class

    return client.submit_request(kind, payload, get_response_class(kind))
