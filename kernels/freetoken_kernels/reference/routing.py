"""Which experts a token takes, and the sum over them, written out: the definition of correct.

Scores and renormalisation: Mixtral (arXiv 2401.04088); a bias for choosing only and groups of experts: DeepSeek-V3
(arXiv 2412.19437).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: F.softplus(logits).sqrt(),
}


def choose(values: Tensor, top_k: int, groups: int = 1, groups_kept: int = 1) -> Tensor:
    """values (tokens, experts) f32 -> (tokens, top_k) i64, best first.

    With groups, only experts of the `groups_kept` groups whose two best values have the largest sums can be chosen.
    """
    if groups > 1:
        grouped = values.unflatten(-1, (groups, -1))  # (tokens, groups, experts / groups)
        worth = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)  # (tokens, groups)
        kept = torch.zeros_like(worth, dtype=torch.bool).scatter(-1, worth.topk(groups_kept, -1).indices, True)
        values = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
    return values.topk(top_k, -1).indices


def mixture(pick: Tensor, weight: Tensor, outputs: Tensor) -> Tensor:
    """sum over rank r of weight[t, r] * outputs[pick[t, r], t].

    pick (tokens, top_k) i64, weight (tokens, top_k) f32, outputs (experts, tokens, hidden) f32: every expert on every
    token -> (tokens, hidden) f32.
    """
    tokens = torch.arange(pick.shape[0])[:, None]
    return (weight[..., None] * outputs[pick, tokens]).sum(1)
