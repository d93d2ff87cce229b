# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler side and an engine's worker side, without a model."""
