# SPDX-License-Identifier: Apache-2.0
"""What Linux lets this process do with its memory."""

from __future__ import annotations

import re
import resource
from pathlib import Path

#: ``madvise``: fault pages in, and fail where a touch would raise SIGBUS. Writes nothing, so that
#: other processes' data is safe. Since Linux 5.14; an older one answers EINVAL.
MADV_POPULATE_WRITE = 23

_CAP_IPC_LOCK = 14


def lock_limit() -> int | None:
    """Bytes that this process may lock; None without a limit.

    Of root too: a container's often lacks CAP_IPC_LOCK, which no limit binds.
    """
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY or _has_capability(_CAP_IPC_LOCK) else limit


def may_lock(size: int) -> tuple[bool, str]:
    """Whether so many bytes may be locked, and why not."""
    limit = lock_limit()
    if limit is None or size <= limit:
        return True, ""
    return False, f"ulimit -l is {limit >> 10} KiB"


def _has_capability(number: int) -> bool:
    status = Path("/proc/self/status").read_text()
    match = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return bool(match and int(match[1], 16) & (1 << number))
