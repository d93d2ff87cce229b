# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine that takes orders: JSON lines on stdin, answers on the file descriptor given.

The first line holds the arguments of `vllm.LLM`; each later one a list of prompts (token ids) and
the arguments of `vllm.SamplingParams`. The answer to a batch has, for each prompt, the tokens and
how many prompt tokens were cached, and the engine's own counters.
"""

import json
import os
import sys
from typing import Any


def main() -> None:
    answers = os.fdopen(int(sys.argv[1]), "w")

    def answer(**values: Any) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    from vllm import LLM, SamplingParams

    llm = LLM(**json.loads(sys.stdin.readline()))
    cache = llm.llm_engine.vllm_config.cache_config
    answer(num_gpu_blocks=cache.num_gpu_blocks)
    for line in sys.stdin:
        order = json.loads(line)
        outputs = llm.generate(
            [{"prompt_token_ids": tokens} for tokens in order["prompts"]],
            SamplingParams(**order["sampling"]),
            use_tqdm=False,
        )
        answer(
            tokens=[list(o.outputs[0].token_ids) for o in outputs],
            cached=[o.num_cached_tokens or 0 for o in outputs],
            metrics={m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")},
        )


if __name__ == "__main__":
    main()
