# SPDX-License-Identifier: Apache-2.0
"""Choosing the next token."""

import torch

_generator = torch.Generator()


def seed(value: int) -> None:
    """Make the draws of this process repeatable."""
    _generator.manual_seed(int(value))


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """The highest logit's index in each row of [batch, vocab]; int32 [batch]."""
    return logits.argmax(-1).to(torch.int32)


def filtered(
    probabilities: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None
) -> torch.Tensor:
    """`probabilities` [batch, vocab] with what top-k and top-p exclude set to zero.

    Args:
        k: [batch]; the k most likely tokens stay.
        p: [batch]; a token stays if those more likely than it sum to less than p.

    The most likely token always stays. Rows are not normalized again.
    """
    ordered, index = probabilities.float().sort(dim=-1, descending=True, stable=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if k is not None:
        keep &= torch.arange(ordered.shape[-1]) < k.reshape(-1, 1)
    if p is not None:
        keep &= ordered.cumsum(-1) - ordered < p.reshape(-1, 1)
    keep[:, 0] = True
    return torch.zeros_like(ordered).scatter(-1, index, ordered.masked_fill(~keep, 0.0))


def top_k_top_p(
    probabilities: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None
) -> torch.Tensor:
    """A draw from each row of [batch, vocab] after top-k and top-p; int32 [batch]."""
    drawn = torch.multinomial(filtered(probabilities, k, p), 1, generator=_generator)
    return drawn.squeeze(-1).to(torch.int32)
