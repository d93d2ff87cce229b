# SPDX-License-Identifier: Apache-2.0
"""``python -m lmcache_rbln.cli``: the command where no script is on the path."""

import sys

from lmcache_rbln.cli import main

sys.exit(main())
