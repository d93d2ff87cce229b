# SPDX-License-Identifier: Apache-2.0
"""What engines load of this package."""
