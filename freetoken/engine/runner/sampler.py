"""Chooses the next token of every row of logits, as SamplingParams says.

A seeded request draws its number from (seed, position) alone, so the same seed and prompt give the same tokens whatever
else runs, however the prompt was cut, and after a preemption. Does not know requests beyond one step's work.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from freetoken.core.errors import EngineError
from freetoken.core.types import SamplingParams, TokenLogprob
from freetoken.engine.step import Sampled, Work

_NUCLEUS = 1024  # candidates sorted first for top_p; a nucleus is rarely larger, and sorting a vocabulary is slow


class Sampler:
    """Holds the generator of unseeded requests, seeded by the operating system."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._entropy = random.Random()

    def __call__(self, logits: Tensor, work: Sequence[Work]) -> list[Sampled]:
        """logits (rows, vocab) f32, one row a work; not changed. Raises EngineError where no number is finite."""
        if not work:
            return []
        if all(_is_plain(one.sampling) for one in work):
            tokens = logits.argmax(-1).tolist()  # the first index among equals
        else:
            tokens = [self._token(row, one) for row, one in zip(logits.unbind(0), work, strict=True)]
        return [
            Sampled(token, None if one.sampling.logprobs is None else _logprob(row, token, one.sampling.logprobs))
            for token, row, one in zip(tokens, logits.unbind(0), work, strict=True)
        ]

    def _token(self, logits: Tensor, work: Work) -> int:
        params = work.sampling
        adjusted = self._adjusted(logits, work)
        if params.greedy:
            return int(adjusted.argmax())
        probabilities = cut(adjusted, params)  # (vocab) f64, not normalised
        draw = self._entropy.random() if params.seed is None else uniform(params.seed, work.end)
        cumulative = probabilities.cumsum(0)
        total = float(cumulative[-1])
        if not 0.0 < total < float("inf"):
            raise EngineError(f"the model's logits for request {work.request_id} are not finite numbers")
        return int(torch.searchsorted(cumulative, draw * total, right=True))

    def _adjusted(self, logits: Tensor, work: Work) -> Tensor:
        """Bias and penalties. Ids outside the vocabulary cannot be produced, so a bias on them changes nothing."""
        params = work.sampling
        bias = [(token, value) for token, value in params.logit_bias if 0 <= token < self._vocab]
        if bias:
            tokens, values = zip(*bias, strict=True)
            logits = logits.index_add(0, torch.tensor(tokens), torch.tensor(values, dtype=torch.float32))
        return penalised(logits, params, work.history, work.prompt_len)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), the same for the same seed and position on every machine."""
    key = struct.pack("<qQ", (seed + 2**63) % 2**64 - 2**63, position)
    return (int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 11) / 2**53


def penalised(logits: Tensor, params: SamplingParams, history: Sequence[int], prompt_len: int) -> Tensor:
    """(vocab) f32. Repetition (arXiv 1909.05858) over the whole history; presence and frequency over the output."""
    if params.repetition_penalty != 1.0 and history:
        seen = torch.tensor(sorted(set(history)))
        values = logits[seen]
        penalty = params.repetition_penalty
        logits = logits.index_copy(0, seen, torch.where(values > 0, values / penalty, values * penalty))
    output = Counter(history[prompt_len:])
    if output and (params.presence_penalty or params.frequency_penalty):
        counts = torch.tensor(list(output.values()), dtype=torch.float32)
        loss = params.presence_penalty + params.frequency_penalty * counts
        logits = logits.index_add(0, torch.tensor(list(output)), loss, alpha=-1)
    return logits


def cut(logits: Tensor, params: SamplingParams) -> Tensor:
    """(vocab) f64: probabilities after temperature, 0 where top_k, top_p or min_p exclude a token; not normalised.

    Equal values at a cut stay together, so that the result does not depend on the order of sorting.
    """
    scaled = logits.double() / params.temperature
    if 0 < params.top_k < len(scaled):
        scaled = scaled.masked_fill(scaled < scaled.topk(params.top_k).values[-1], float("-inf"))
    probabilities = scaled.softmax(-1)
    floor = 0.0
    if params.top_p < 1.0:
        floor = _nucleus_floor(probabilities, params.top_p)
    if params.min_p > 0.0:
        floor = max(floor, params.min_p * float(probabilities.max()))
    return probabilities.masked_fill(probabilities < floor, 0.0) if floor else probabilities


def _nucleus_floor(probabilities: Tensor, top_p: float) -> float:
    """The least probability in the smallest set of best tokens that together reach `top_p`."""
    best = probabilities.topk(min(_NUCLEUS, len(probabilities))).values
    cumulative = best.cumsum(0)
    if float(cumulative[-1]) < top_p:
        best = probabilities.sort(descending=True).values
        cumulative = best.cumsum(0)
    last = int(torch.searchsorted(cumulative, top_p))  # the first place where the sum reaches top_p
    return float(best[min(last, len(best) - 1)])


def _is_plain(params: SamplingParams) -> bool:
    """Greedy, and nothing moves the logits."""
    penalties = params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
    return params.greedy and not params.logit_bias and not penalties


def _logprob(logits: Tensor, token: int, best: int) -> TokenLogprob:
    logprobs = logits.log_softmax(-1)
    values, ids = logprobs.topk(min(best, len(logprobs)))
    return TokenLogprob(token, float(logprobs[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))
