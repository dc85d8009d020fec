"""What a request needs before it may run, and whether the pools have it: one predicate for "ever" and for "now". Pure.

"Can it ever run?" is `fits` against the whole pools, asked at the door; "can it run now?" is the same `fits` against
what is free. Does not know which pages, nor the order of the queue.
"""

from __future__ import annotations

from dataclasses import dataclass

from freetoken.core.errors import ContextLengthExceeded
from freetoken.engine.paging.rules import Paged
from freetoken.plan.choices import Resolved


@dataclass(frozen=True, slots=True)
class Demand:
    pages: int

    def fits(self, pages: int) -> bool:
        """Whether pools that hold `pages` satisfy it."""
        return self.pages <= pages


def demand(tokens: int, rule: Paged, *, held: int = 0, resumed: bool = False) -> Demand:
    """What a sequence of `tokens` needs beyond the `held` pages that the prefix cache has locked for it.

    One page for output is wanted up front, so that a request is not admitted only to be preempted at once. One that
    was preempted does without: with it, a request that had grown to the size of the pool could never come back.
    """
    return Demand(rule.pages(tokens) - held + (0 if resumed else 1))


def check_length(prompt: int, rule: Paged, limits: Resolved) -> None:
    """Raises ContextLengthExceeded when a prompt of `prompt` tokens can never run here; says by how much."""
    pool = limits.num_pages * rule.page_size
    numbers = {"prompt_tokens": prompt, "context_tokens": limits.max_seq_len, "pool_tokens": pool}
    if prompt >= limits.max_seq_len:
        raise ContextLengthExceeded(
            f"The prompt has {prompt:,} tokens and the context holds {limits.max_seq_len:,}, one of them for output: "
            "shorten the prompt, or load the model with a larger --max-seq-len-override or --num-tokens.",
            numbers=numbers,
        )
    if not demand(prompt, rule).fits(limits.num_pages):
        raise ContextLengthExceeded(
            f"The prompt has {prompt:,} tokens and the KV pool holds {pool:,}, one page of {rule.page_size} for "
            "output: shorten the prompt, or load the model with a larger --num-tokens.",
            numbers=numbers,
        )
