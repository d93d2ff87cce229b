# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.hardware``: the hardware lane."""

import sys

from tests.hardware.lane import main

sys.exit(main())
