"""What a request needs before it may run, and whether the pools have it: one predicate for "ever" and for "now". Pure.

"Can it ever run?" is `demand` against the whole pools, asked at the door and when a pool shrinks; "can it run now?" is
the same `demand` against what is free, asked once the prefix cache has locked its pages for the request. Does not know
which pages, nor the order of the queue.
"""

from __future__ import annotations

from freetoken.core.errors import ContextLengthExceeded
from freetoken.engine.paging.rules import Demand, Layout
from freetoken.engine.step import Request

_NOTHING = Demand()


def demand(tokens: int, layout: Layout, *, held: Demand = _NOTHING, resumed: bool = False) -> Demand:
    """What a sequence of `tokens` needs beyond what it holds already: what the prefix cache has locked for it.

    One page for output is wanted up front, so that a request is not admitted only to be preempted at once. One that
    was preempted does without: with it, a request that had grown to the size of the pool could never come back.
    """
    return layout.least(tokens, spare=0 if resumed else 1).beyond(held)


def check_window(prompt: int, max_seq_len: int, numbers: dict[str, int]) -> None:
    """Raises ContextLengthExceeded, with `numbers`, when the context has no room for a token after the prompt."""
    if prompt >= max_seq_len:
        raise ContextLengthExceeded(
            f"The prompt has {prompt:,} tokens and the context holds {max_seq_len:,}, one of them for output: "
            "shorten the prompt, or load the model with a larger --max-seq-len-override or --num-tokens.",
            numbers=numbers,
        )


def check_pools(request: Request, layout: Layout, capacity: Demand, numbers: dict[str, int]) -> None:
    """Raises ContextLengthExceeded, with `numbers`, when pools of `capacity` can never hold `request`."""
    tokens = len(request.token_ids)
    need = demand(tokens, layout, resumed=request.preempted)
    if need.fits(capacity):
        return
    size = layout.page_size
    output = "" if request.preempted else f", one page of {size} for output"
    if need.pages > capacity.pages:
        what = f"the KV pool holds {capacity.pages * size:,}{output}"
    elif need.window > capacity.window:
        what = f"needs {need.window:,} pages of the sliding-window pool, which holds {capacity.window:,}{output}"
    else:
        what = f"needs {need.states} recurrent state, and there are {capacity.states}"
    raise ContextLengthExceeded(
        f"The {'request' if request.output_len else 'prompt'} has {tokens:,} tokens and {what}: shorten the prompt, or "
        "load the model with a larger --num-tokens.",
        numbers=numbers,
    )
