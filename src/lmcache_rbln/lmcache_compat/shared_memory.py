# SPDX-License-Identifier: Apache-2.0
"""How an LMCache server's shared memory is named, and what makes a server share it.

Versions: 0.5.4, 0.5.5, 0.5.6.
"""

from __future__ import annotations

from pathlib import Path

#: Where Linux shows POSIX shared-memory segments.
SHM_FOLDER = Path("/dev/shm")
#: LMCache puts this before the names of pools that do not begin with it.
SHM_PREFIX = "lmcache_l1_pool_"
#: What makes a server share its memory, for advice.
SHARED_MEMORY_FLAGS = "--shm-name lmcache_kv --no-l1-use-lazy"
