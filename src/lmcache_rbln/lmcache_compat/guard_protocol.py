# SPDX-License-Identifier: Apache-2.0
"""What the guards in server and worker say to each other.

A guarded server numbers each reservation of shared memory and sends the number with every slot; a
guarded worker ends the reservation by that number, as written or as given up. A peer without the
guard sees nothing of it: it ignores the number, and a worker sends none that it was not given.

Imports neither LMCache nor torch.
"""

from __future__ import annotations

import secrets

from lmcache_rbln._switch import is_on

__all__ = ["GIVE_UP", "WRITTEN", "is_enabled"]

#: ``LMCACHE_RBLN_GUARD=0`` leaves LMCache's handling of unfinished writes as it is.
VARIABLE = "LMCACHE_RBLN_GUARD"

#: The field of a slot that carries the reservation's number.
SLOT_FIELD = "lmcache_rbln_reservation"

#: The field of the server's status page that carries the guard's version.
STATUS_FIELD = "lmcache_rbln_write_guard"

#: How a reservation ends.
WRITTEN = "written"
GIVE_UP = "give-up"

# The payload of a commit is empty or a pickle; no pickle starts like this.
_PREFIX = b"lmcache-rbln reservation "


def is_enabled() -> bool:
    """Whether the guards are to be installed in this process."""
    return is_on(VARIABLE)


def new_reservation() -> str:
    """A number that no other reservation has, on this server or one before it."""
    return secrets.token_hex(16)


def encode(reservation: str, ending: str) -> bytes:
    """The payload of a commit that ends a reservation as :data:`WRITTEN` or :data:`GIVE_UP`."""
    return _PREFIX + f"{reservation} {ending}".encode()


def decode(payload: bytes) -> tuple[str, str] | None:
    """The reservation and how it ends; None if the payload is not :func:`encode`'s."""
    if not payload.startswith(_PREFIX):
        return None
    reservation, _, ending = payload[len(_PREFIX) :].decode("ascii", "replace").partition(" ")
    return reservation, ending
