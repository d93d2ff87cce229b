# SPDX-License-Identifier: Apache-2.0
"""The device functions that kernel bodies call, which are never run."""
