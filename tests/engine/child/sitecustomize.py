# SPDX-License-Identifier: Apache-2.0
"""Runs in every Python process of an engine under test: SIGUSR2 prints all its stacks."""

import faulthandler
import signal

faulthandler.register(signal.SIGUSR2, all_threads=True, chain=False)
