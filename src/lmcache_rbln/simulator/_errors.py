# SPDX-License-Identifier: Apache-2.0
"""What goes wrong around the simulated runtime, as one exception type."""

from __future__ import annotations


class SimulatorError(RuntimeError):
    """The simulated runtime could not be built, loaded or used; the text says what to do."""
