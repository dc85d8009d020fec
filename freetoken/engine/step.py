"""All that passes between deciding (scheduler, paging) and doing (runner). Pure, no torch.

The loop asks the scheduler for a StepPlan, hands it to the runner, and gives the StepResult back to the scheduler.
Does not know tensors, sockets or how pages are found.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from freetoken.core.types import GenerateRequest, SamplingParams, TokenLogprob


@dataclass(slots=True, eq=False)
class Request:
    """The engine's own state of one request. Owned by the scheduler; the runner only reads it through Work.

    Requests are compared by identity: an id may come back while its former owner's last step is still running.
    """

    id: str
    prompt_len: int
    token_ids: list[int]  # prompt, then output
    sampling: SamplingParams
    eos_ids: frozenset[int]
    arrived_s: float  # monotonic
    deadline_s: float  # monotonic: latest moment to leave the queue
    max_len: int  # prompt + output may not grow past this many tokens
    computed: int = 0  # tokens whose KV is in pages (the prefix hit included)
    cached: int = 0  # prompt tokens found in the prefix cache at admission
    pages: list[int] = field(default_factory=list)  # of the full pool
    window: list[int] = field(default_factory=list)  # of the sliding-window pool, from its page `slid` on
    slid: int = 0
    state: int | None = None  # slot of its recurrent state
    source: int | None = None  # snapshot that its next step starts from
    saving: int | None = None  # snapshot that the running step leaves at its end
    preempted: bool = False  # it ran, and was put back for want of pages
    overtaken: int = 0  # later requests that started before it

    @classmethod
    def of(cls, request: GenerateRequest, *, now_s: float, deadline_s: float, max_len: int) -> Request:
        return cls(
            id=request.id,
            prompt_len=len(request.token_ids),
            token_ids=list(request.token_ids),
            sampling=request.sampling,
            eos_ids=frozenset(request.eos_ids),
            arrived_s=now_s,
            deadline_s=deadline_s,
            max_len=max_len,
        )

    @property
    def output_len(self) -> int:
        return len(self.token_ids) - self.prompt_len


@dataclass(frozen=True, slots=True)
class StateWork:
    """What a work does to recurrent states. All are numbers of slots; snapshots have slots of their own."""

    slot: int  # read and written
    source: int | None = None  # snapshot to start from; None: what is in `slot`, or zero at position 0
    saving: int | None = None  # snapshot to leave behind the last position


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence's part of a step: compute positions start .. start + len(token_ids) - 1."""

    request_id: str
    token_ids: tuple[int, ...]  # the new tokens, in order
    start: int  # position of the first of them = tokens already in the pages
    pages: tuple[int, ...]  # page table; covers at least start + len(token_ids) positions
    sample: bool  # the last position's logits give the next token
    sampling: SamplingParams
    history: tuple[int, ...] = ()  # all tokens so far; filled only where a penalty needs them
    prompt_len: int = 0  # history[prompt_len:] is the output
    window: tuple[int, ...] = ()  # page table of the sliding-window pool, from its page `slid` on
    slid: int = 0
    state: StateWork | None = None  # where a mixer is recurrent

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass over several sequences. Never empty."""

    work: tuple[Work, ...]

    @property
    def tokens(self) -> int:
        return sum(len(work.token_ids) for work in self.work)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token chosen for one Work with `sample`."""

    token_id: int
    logprob: TokenLogprob | None = None  # where the request asked for logprobs


@dataclass(frozen=True, slots=True)
class StepResult:
    """Sampled tokens by request id, for exactly the plan's Work with `sample`."""

    sampled: dict[str, Sampled]
    forward_ns: int
