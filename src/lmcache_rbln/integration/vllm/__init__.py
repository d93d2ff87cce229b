# SPDX-License-Identifier: Apache-2.0
"""LMCache for vLLM on RBLN NPUs."""
