# SPDX-License-Identifier: Apache-2.0
"""Tiny random models made on the spot, and what transformers itself makes of them."""

import functools
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    LlamaConfig,
    MistralConfig,
)
from transformers.cache_utils import DynamicCache

from lmcache_rbln.cli._tiny_model import save_tokenizer

# Threads of a second core only wait for each other over models this small.
torch.set_num_threads(1)

VOCABULARY = 512
# A wide spread makes the next token depend on every earlier one, and ties improbable.
SPREAD = 0.4
COMMON = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "initializer_range": SPREAD,
    "rms_norm_eps": 1e-5,
}
# The smallest head size that vLLM-RBLN's attention takes.
HEADS = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}

CONFIGURATIONS = {
    "llama": lambda: LlamaConfig(**COMMON, **HEADS, intermediate_size=192),
    "mistral": lambda: MistralConfig(**COMMON, **HEADS, intermediate_size=192, sliding_window=32),
    # vLLM-RBLN's latent attention takes one width: a rank of 512 and a rope part of 64.
    "deepseek": lambda: DeepseekV2Config(
        **{**COMMON, "initializer_range": 0.08},
        hidden_size=128,
        intermediate_size=192,
        moe_intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        topk_method="greedy",
        n_group=1,
        topk_group=1,
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}


def make(name: str, folder: Path) -> Path:
    """Save model `name` of `CONFIGURATIONS`, float32, and a tokenizer of words w0, w1, ..."""
    torch.manual_seed(0)
    configuration = CONFIGURATIONS[name]()
    AutoModelForCausalLM.from_config(configuration, dtype=torch.float32).save_pretrained(folder)
    save_tokenizer(folder, VOCABULARY)
    return folder


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random tokens, none of them special; the same for the same seed, whatever the length."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, VOCABULARY, (2048,), generator=generator)[:length].tolist()


class _Fp8Cache(DynamicCache):
    """Keys and values as an fp8 cache gives them back, the scales being 1."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        limit = torch.finfo(torch.float8_e4m3fn).max
        rounded = [
            t.float().clamp(-limit, limit).to(torch.float8_e4m3fn).to(t.dtype)
            for t in (key_states, value_states)
        ]
        return super().update(*rounded, layer_idx, *args, **kwargs)


class Reference:
    """transformers' own model: weights rounded to the engine's dtype, math in float32.

    Args:
        folder: of the model.
        dtype: of the engine.
        fp8_cache: whether the engine keeps keys and values as fp8.
    """

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32, fp8_cache: bool = False):
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager"
        )
        self._model = model.float().eval()
        self._fp8_cache = fp8_cache
        self._greedy = functools.lru_cache(maxsize=None)(self._search)

    def _new_cache(self):
        return (_Fp8Cache if self._fp8_cache else DynamicCache)(config=self._model.config)

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """float32 [len(tokens), vocabulary]."""
        return self._model(torch.tensor([tokens]), past_key_values=self._new_cache()).logits[0]

    def tokens(self, prompt: list[int], count: int) -> list[int]:
        """The `count` tokens that follow greedily."""
        return list(self._greedy(tuple(prompt), count))

    @torch.no_grad()
    def _search(self, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
        cache, new, found = self._new_cache(), list(prompt), []
        for _ in range(count):
            logits = self._model(torch.tensor([new]), past_key_values=cache).logits
            new = [int(logits[0, -1].argmax())]
            found += new
        return tuple(found)

    def shortfall(self, prompt: list[int], generated: list[int]) -> float:
        """Teacher forcing: how far below the highest logit, given all tokens before it, a
        generated token was at worst, in standard deviations of that row's logits.

        0 if each was this model's own choice; several if the tokens came from other keys and
        values.
        """
        logits = self.logits(prompt + generated)[len(prompt) - 1 : -1]
        chosen = logits.gather(-1, torch.tensor(generated).unsqueeze(-1)).squeeze(-1)
        return float(((logits.max(-1).values - chosen) / logits.std(-1)).max())
