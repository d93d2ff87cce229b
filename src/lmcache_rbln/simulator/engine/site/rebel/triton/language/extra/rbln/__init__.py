# SPDX-License-Identifier: Apache-2.0
"""The RBLN extension of the kernel language."""
