# SPDX-License-Identifier: Apache-2.0
"""What one check of the doctor says."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Status(str, enum.Enum):
    """Outcome of a check."""

    OK = "ok"
    #: Serving works, but something is worth changing.
    WARNING = "warning"
    #: Serving would not work.
    FAILED = "failed"


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        name: what was looked at; the same in every report.
        status: the outcome.
        found: what was found, in one line.
        next_step: what exactly to do; "" only where nothing is.
    """

    name: str
    status: Status
    found: str
    next_step: str = ""

    def __post_init__(self) -> None:
        if self.status is not Status.OK and not self.next_step:
            raise ValueError(f"the check {self.name!r} is {self.status.value} without a next step")


def ok(name: str, found: str) -> Check:
    """Nothing to do."""
    return Check(name, Status.OK, found)


def warning(name: str, found: str, next_step: str) -> Check:
    """Serving works, but ``next_step`` is advised."""
    return Check(name, Status.WARNING, found, next_step)


def failed(name: str, found: str, next_step: str) -> Check:
    """Serving would not work until ``next_step`` is done."""
    return Check(name, Status.FAILED, found, next_step)
