"""Which requests run in the next step, and what became of them after it: continuous batching. Pure.

Every step takes one token of each sequence that decodes, and beside them prefill up to `max_prefill_tokens`: neither
waits for the other. Running requests are in order of admission. When pages run out the newest of them goes back to the
head of the queue, its pages to the prefix cache, and is computed again later. So do those that lose their pages when
the pool shrinks. A step that ran out of memory is planned again, smaller (retry.py).

Use: `submit`, `cancel` and `expire` at any time, then `next_plan`, run it, `accept` (or `retry`), perhaps `resize`;
`take_events` gives what callers must be told. Not thread-safe. Does not know tensors, threads or sockets.
"""

from __future__ import annotations

from dataclasses import dataclass

from freetoken.core.errors import ContextLengthExceeded, FreeTokenError, OutOfMemory, QueueTimeout, UsageError
from freetoken.core.events import Failed, GenerationEvent, Progress, Tokens
from freetoken.core.ports import Clock
from freetoken.core.types import FinishReason, GenerateRequest
from freetoken.engine.paging.manager import PageManager
from freetoken.engine.paging.rules import Demand, Layout
from freetoken.engine.scheduler.admission import check_pools, check_window, demand
from freetoken.engine.scheduler.chunking import next_work, piece, remaining
from freetoken.engine.scheduler.queue import WaitingQueue
from freetoken.engine.scheduler.retry import StepSize
from freetoken.engine.step import Request, Sampled, StepPlan, StepResult, Work
from freetoken.plan.choices import Resolved

Told = tuple[str, GenerationEvent]  # request id, what to tell its caller


@dataclass(slots=True)
class Totals:
    """Tokens since the start."""

    prompt: int = 0  # of requests whose prompt is done
    cached: int = 0  # of those, found in the prefix cache
    output: int = 0
    prefilled: int = 0  # computed as prompt, or again after a preemption


class Scheduler:
    """`layout` is what the model keeps of a sequence; `limits` has the size of each of its pools."""

    def __init__(self, limits: Resolved, layout: Layout, clock: Clock) -> None:
        capacity = Demand(limits.num_pages, limits.window_pages, limits.state_slots)
        self.pages = PageManager(layout, capacity, limits.snapshot_slots)
        self.totals = Totals()
        self._limits = limits
        self._clock = clock
        self._live: dict[str, Request] = {}
        self._queue = WaitingQueue()
        self._running: list[Request] = []
        self._flying: dict[str, Request] = {}  # those of the step that is being computed
        self._size = StepSize(limits.max_prefill_tokens, limits.max_running_requests)
        self._refused_at: tuple[int, int] | None = None  # since then nothing has come that could let another start
        self._events: list[Told] = []

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def live_ids(self) -> list[str]:
        return list(self._live)

    def take_events(self) -> list[Told]:
        """What happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    # ── coming and going ────────────────────────────────────────────────────────────────────────────────────────────
    def submit(self, asked: GenerateRequest) -> None:
        """Queue a request. Raises UsageError, ContextLengthExceeded (it can never run here) or QueueFull."""
        if asked.id in self._live:
            raise UsageError(f"A request with the id {asked.id} is already running.")
        if not asked.token_ids:
            raise UsageError("The prompt has no tokens.")
        request = self._request(asked)
        check_window(request.prompt_len, self._limits.max_seq_len, self._context(request))
        check_pools(request, self.pages.layout, self.pages.capacity, self._context(request))
        limits = self._limits
        self._queue.check_room(limits.max_queued, about_to_run=limits.max_running_requests - len(self._running))
        self._live[request.id] = request
        self._queue.push(request)
        if request.max_len <= request.prompt_len:
            self._finish(request, Tokens((), cached=0, finish=FinishReason.LENGTH))

    def cancel(self, request_id: str) -> bool:
        """Forget a request and free all it holds; False when it is not there. Nobody is told.

        The pages of one in the step that is being computed are still written to: they are freed when it ends.
        """
        request = self._live.get(request_id)
        if request is None:
            return False
        self._forget(request)
        return True

    def cancel_all(self) -> None:
        """End every request as cancelled, and say so."""
        for request in list(self._live.values()):
            self._finish(request, Tokens((), finish=FinishReason.CANCELLED))

    def expire(self) -> None:
        """Fail what has waited past its deadline, with its position and what it waits for."""
        now = self._clock.monotonic()
        for request in self._queue:
            if now >= request.deadline_s:
                self._fail(request, self._timeout(request, now))

    def resize(self, num_pages: int) -> None:
        """The full pool has `num_pages` pages from now on; no step may be in flight.

        Requests on pages that are no more go back to the queue, in their order; those that can never fit any more
        fail with ContextLengthExceeded.
        """
        assert not self._flying, "a step is being computed"
        for request in reversed(tuple(self._running)):
            if any(page >= num_pages for page in request.pages):
                self._preempt(request)
        self.pages.resize(num_pages)
        for request in self._queue:
            try:
                check_pools(request, self.pages.layout, self.pages.capacity, self._context(request))
            except ContextLengthExceeded as error:
                self._fail(request, error)

    # ── one step ────────────────────────────────────────────────────────────────────────────────────────────────────
    def next_plan(self) -> StepPlan | None:
        """The next step; None when nothing can run. The one before must have been accepted or retried."""
        assert not self._flying, "a step is being computed"
        work = self._plan()
        self._flying = {part.request_id: self._live[part.request_id] for part in work}
        return StepPlan(tuple(work)) if work else None

    def accept(self, plan: StepPlan, result: StepResult) -> None:
        """Take in what the step computed; drop what was cancelled meanwhile."""
        self._size.went_well()
        flying, self._flying = self._flying, {}
        for work in plan.work:
            request = flying[work.request_id]
            if self._is_live(request):
                self._take(request, work, result.sampled.get(request.id))
            else:
                self.pages.release(request)

    def retry(self, plan: StepPlan, error: OutOfMemory) -> None:
        """The step ran out of memory: its requests stay where they were, and the next plan is smaller.

        Pages that the step may have written are written again. Where no plan is smaller, its one request fails with
        `error` and frees what it holds.
        """
        flying, self._flying = self._flying, {}
        smaller = self._size.failed(plan)
        for request in flying.values():
            if not self._is_live(request):
                self.pages.release(request)
            elif smaller:
                self.pages.rewind(request)
            else:
                self._fail(request, error)

    def _plan(self) -> list[Work]:
        """Those that run, oldest first, then those that may start. Decodes come before prefill in the step."""
        decodes: list[Work] = []
        prefills: list[Work] = []
        budget, place = self._size.tokens, 0
        while place < len(self._running) and len(decodes) + len(prefills) < self._size.works:
            request = self._running[place]
            if remaining(request) == 1:
                decodes += self._work(request, 1)
            elif budget:
                self.pages.advance(request)
                prefills += (part := self._work(request, budget))
                budget -= sum(len(work.token_ids) for work in part)
            if place < len(self._running) and self._running[place] is request:  # else it was put back, or has ended
                place += 1
        return decodes + prefills + self._starts(budget, self._size.works - len(decodes) - len(prefills))

    def _starts(self, budget: int, most: int) -> list[Work]:
        """Let those start that wait and fit. Not asked again before something changes that could let them."""
        work: list[Work] = []
        if not self._queue or (self.pages.returns, self._queue.changes) == self._refused_at:
            return work
        for request in self._queue.candidates():
            if not budget or len(work) >= most or len(self._running) >= self._limits.max_running_requests:
                return work
            if self._admit(request):
                work += (part := self._work(request, budget))
                budget -= sum(len(one.token_ids) for one in part)
        self._refused_at = self.pages.returns, self._queue.changes
        return work

    def _work(self, request: Request, budget: int) -> list[Work]:
        """The next piece of `request`, at most `budget` tokens. Empty: there is no room, and it does not run now."""
        most = piece(request, budget, self.pages.layout)
        while not (count := self.pages.extend(request, most)):
            if len(self._running) == 1:
                self._finish(request, Tokens((), finish=FinishReason.LENGTH, limited_by="kv_pool"))
                return []
            newest = self._running[-1]
            self._preempt(newest)
            if newest is request:
                return []
        return [next_work(request, count)]

    def _admit(self, request: Request) -> bool:
        """Move one that waits to those that run, if it fits now."""
        self.pages.attach(request)
        held = self.pages.held(request)
        need = demand(len(request.token_ids), self.pages.layout, held=held, resumed=request.preempted)
        if not (need.fits(self.pages.room) and self.pages.fill(request)):
            self.pages.detach(request)
            return False
        if not request.preempted:
            request.cached = request.computed
        self._queue.start(request)
        self._running.append(request)
        return True

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self.pages.release(request)
        self._queue.put_back(request, self._clock.monotonic() + self._limits.queue_deadline_s)

    # ── one request ─────────────────────────────────────────────────────────────────────────────────────────────────
    def _request(self, asked: GenerateRequest) -> Request:
        now, deadline_ms, most = self._clock.monotonic(), asked.deadline_ms, asked.sampling.max_tokens
        window = self._limits.max_seq_len
        return Request.of(
            asked,
            now_s=now,
            deadline_s=now + (self._limits.queue_deadline_s if deadline_ms is None else deadline_ms / 1000),
            max_len=window if most is None else min(window, len(asked.token_ids) + most),
        )

    def _take(self, request: Request, work: Work, sampled: Sampled | None) -> None:
        prefill = request.output_len == 0 or len(work.token_ids) > 1 or not work.sample
        request.computed = work.end
        if prefill:
            self.totals.prefilled += len(work.token_ids)
        if prefill or request.source is not None:
            self.pages.publish(request)
        if request.output_len == 0:
            self._tell(request, Progress(request.computed, request.prompt_len))
        if work.sample:
            assert sampled is not None
            self._append(request, sampled)

    def _append(self, request: Request, sampled: Sampled) -> None:
        cached = None
        if request.output_len == 0:
            cached = request.cached
            self.totals.prompt += request.prompt_len
            self.totals.cached += cached
        if sampled.token_id in request.eos_ids and not request.sampling.ignore_eos:
            self._finish(request, Tokens((), cached=cached, finish=FinishReason.STOP))
            return
        request.token_ids.append(sampled.token_id)
        self.totals.output += 1
        logprobs = (sampled.logprob,) if sampled.logprob is not None else ()
        if len(request.token_ids) < request.max_len:
            self._tell(request, Tokens((sampled.token_id,), logprobs, cached))
            return
        by = self._limited_by(request)
        self._finish(request, Tokens((sampled.token_id,), logprobs, cached, FinishReason.LENGTH, by))

    def _limited_by(self, request: Request) -> str | None:
        """ "kv_pool" where a larger pool, not the caller or the model's window, would have let `request` go on."""
        if request.sampling.max_tokens == request.output_len:
            return None
        return "kv_pool" if self._limits.max_seq_len >= self._pool_tokens else None

    def _finish(self, request: Request, last: Tokens) -> None:
        self._tell(request, last)
        self._forget(request)

    def _fail(self, request: Request, error: FreeTokenError) -> None:
        self._tell(request, Failed(error.code, error.detail, error.numbers))
        self._forget(request)

    def _tell(self, request: Request, event: GenerationEvent) -> None:
        self._events.append((request.id, event))

    def _forget(self, request: Request) -> None:
        del self._live[request.id]
        if request not in self._running:
            self._queue.remove(request)
            return
        self._running.remove(request)
        if self._flying.get(request.id) is not request:
            self.pages.release(request)

    def _is_live(self, request: Request) -> bool:
        return self._live.get(request.id) is request

    # ── what callers are told when there is no room ─────────────────────────────────────────────────────────────────
    @property
    def _pool_tokens(self) -> int:
        return self.pages.total * self.pages.layout.page_size

    def _context(self, request: Request) -> dict[str, int]:
        return {
            "prompt_tokens": request.prompt_len,
            "context_tokens": self._limits.max_seq_len,
            "pool_tokens": self._pool_tokens,
        }

    def _timeout(self, request: Request, now_s: float) -> QueueTimeout:
        need = demand(len(request.token_ids), self.pages.layout, resumed=request.preempted)
        room, most = self.pages.room, self._limits.max_running_requests
        if len(self._running) >= most:
            reason = f"{len(self._running)} of at most {most} requests were running"
        elif need.pages <= room.pages and need.window > room.window:
            reason = f"it needs up to {need.window} pages of the sliding-window pool and {room.window} were free"
        else:
            reason = f"it needs up to {need.pages} KV pages and {room.pages} of {self.pages.total} were free"
        return self._queue.timeout(request, now_s, reason, {"pages": need.pages, "free": room.pages})
