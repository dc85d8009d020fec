"""The vocabulary of one generation: what is asked of an engine and what is counted. Pure, stdlib only.

Does not know text, HTTP or tensors: an engine sees token ids only.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a generation ended. The values are OpenAI's where OpenAI has one."""

    STOP = "stop"  # an end-of-sequence token, or a stop string found by the text layer
    LENGTH = "length"  # max_tokens, the context window, or the KV pool (see `limited_by`)
    CANCELLED = "cancelled"  # the caller went away


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Neutral values leave the distribution alone; temperature 0 is greedy.

    Order of application: logit_bias, penalties, temperature, top_k, top_p, min_p.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0: no limit
    top_p: float = 1.0
    min_p: float = 0.0  # keeps tokens with probability >= min_p * the best token's
    repetition_penalty: float = 1.0  # CTRL paper (arXiv 1909.05858): over prompt and output
    presence_penalty: float = 0.0  # OpenAI: over the output, once a token
    frequency_penalty: float = 0.0  # OpenAI: over the output, times its count
    seed: int | None = None  # the same seed and prompt give the same tokens whatever else runs
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None  # None: none; n: the chosen token's and the n best
    max_tokens: int | None = None  # None: as far as the context window goes
    ignore_eos: bool = False

    @property
    def greedy(self) -> bool:
        return self.temperature <= 0.0


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt, as token ids, and how to go on from it."""

    id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    eos_ids: tuple[int, ...] = ()
    deadline_ms: int | None = None  # longest time in the queue before QUEUE_TIMEOUT; None: the engine's default


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The natural log of a chosen token's probability before temperature and cuts, and the best alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request, as the APIs report them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0  # prompt tokens whose KV was found in the prefix cache
    limited_by: str | None = None  # "kv_pool" where the pool, not the caller, ended the answer

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens
