# SPDX-License-Identifier: Apache-2.0
"""Makes a small random Llama model: ``python -m lmcache_rbln.cli._tiny_model FOLDER``.

A program of its own, so that ``lmcache-rbln serve`` needs not import torch.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

VOCABULARY = 2048
MAX_LENGTH = 4096


def make(folder: Path) -> None:
    """Save the model and a tokenizer whose words are w0, w1, ... ; the same one each time."""
    import torch

    # No dependency of this package, and its annotations vary.
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
        # Wide, so that each token depends on all before it and no two logits tie.
        initializer_range=0.3,
    )
    transformers.LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    save_tokenizer(folder, VOCABULARY)


def save_tokenizer(folder: Path, vocabulary: int) -> None:
    """Save a tokenizer of the words w4, w5, ... up to so many tokens, special ones included."""
    # Neither is a dependency of this package, and their annotations vary.
    transformers: Any = importlib.import_module("transformers")
    tokenizers: Any = importlib.import_module("tokenizers")
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    words.update({f"w{i}": i for i in range(4, vocabulary)})
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
    ).save_pretrained(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
