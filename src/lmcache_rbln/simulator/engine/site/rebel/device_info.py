# SPDX-License-Identifier: Apache-2.0
"""Which NPU the graphs are for."""

import os

# The generation whose sliding-window operator shifts its window in place. vLLM-RBLN's vllm model
# path refuses the older RBLN-CA names.
DEFAULT_NPU_NAME = "RBLN-CR03"


def get_npu_name(device_id: int = 0) -> str:
    """The NPU's product name: `RBLN_FORCE_NPU_NAME` or `DEFAULT_NPU_NAME`."""
    return os.environ.get("RBLN_FORCE_NPU_NAME") or DEFAULT_NPU_NAME
