# SPDX-License-Identifier: Apache-2.0
"""Options that graphs compiled together share."""

from typing import Any


class CompileContext:
    """Carries options; there is no compiled state to share between graphs here."""

    def __init__(
        self, use_weight_sharing: bool = False, use_global_ctx: bool = False, **options: Any
    ) -> None:
        self.use_weight_sharing = use_weight_sharing
        self.use_global_ctx = use_global_ctx
        self.options = options
