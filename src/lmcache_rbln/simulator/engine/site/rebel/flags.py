# SPDX-License-Identifier: Apache-2.0
"""Switches that the environment sets."""

import os

RBLN_PROFILER = os.environ.get("RBLN_PROFILER", "0").lower() in ("1", "true")
