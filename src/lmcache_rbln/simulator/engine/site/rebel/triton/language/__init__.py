# SPDX-License-Identifier: Apache-2.0
"""Names that kernel signatures use. Kernel bodies are never run."""


class constexpr:  # noqa: N801  # the dialect's spelling
    """Annotation of a compile-time argument."""
