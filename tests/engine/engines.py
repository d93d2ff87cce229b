# SPDX-License-Identifier: Apache-2.0
"""Engine settings that the tests share."""

from tests.engine import processes

BLOCK = 64
PREFILL = 128
# Shorter than a block, a block, between, the prefill width, one more, several of both.
LENGTHS = (5, 64, 100, 128, 129, 301)

NO_WARM_UP = {"VLLM_RBLN_ENABLE_WARM_UP": "0"}
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
# How far below the best logit a token may be where rounding differs, in standard deviations. The
# worst seen is 0.2; tokens computed from other keys and values are off by 2 and more.
ROUNDING = 0.6


def engine(folder, model, *, settings=(), options=(), watched=(), **llm):
    """A small engine without warm-up, in one process unless `settings` says otherwise."""
    arguments = {
        "model": str(model),
        "model_impl": "vllm",
        "block_size": BLOCK,
        "max_model_len": 512,
        "max_num_batched_tokens": PREFILL,
        "max_num_seqs": 4,
        "dtype": "float32",
        "num_gpu_blocks_override": 48,
        "disable_log_stats": False,
        **llm,
    }
    return processes.Engine(
        folder,
        settings={**NO_WARM_UP, **IN_PROCESS, **dict(settings)},
        options=options,
        watched=watched,
        **arguments,
    )


def chunks(lengths, chunk=64):
    """Chunks that prompts of these lengths, with nothing in common, are stored as."""
    return sum(length // chunk for length in lengths)


def reusable(length, chunk=64):
    """Tokens of a stored prompt that a hit spares: whole chunks, but never the last token, whose
    logits are needed."""
    return min(length // chunk * chunk, length - 1)
