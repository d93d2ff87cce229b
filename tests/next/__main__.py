# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.next``: the next LMCache."""

import sys

from tests.next.lane import main

sys.exit(main())
