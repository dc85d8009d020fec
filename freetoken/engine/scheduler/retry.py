"""How large a step may be after one ran out of memory: halved until it goes, and back up after a while. Pure.

A failed step is not taken in: its requests are where they were, so the retry is only the next plan, made smaller. First
prefill is halved down to FLOOR tokens, then the number of requests in a step. What fails then is one request's
smallest piece, and only that request. What helped stays for RECOVERY good steps, or each next chunk would die again.
"""

from __future__ import annotations

from freetoken.engine.step import StepPlan

FLOOR = 16  # tokens of prefill: below, a step's memory is all but that of one token
RECOVERY = 64  # steps that went well before the next step may be twice as large


class StepSize:
    """`tokens` is the most prefill in a step, `works` the most requests; neither exceeds what it began with."""

    def __init__(self, tokens: int, works: int) -> None:
        self.tokens, self.works = tokens, works
        self._most = tokens, works
        self._good = 0

    def failed(self, plan: StepPlan) -> bool:
        """`plan` ran out of memory: make the next one smaller. False: no plan is, it was one smallest piece."""
        self._good = 0
        prefill = sum(len(work.token_ids) for work in plan.work if len(work.token_ids) > 1)
        if prefill > FLOOR:
            self.tokens = max(FLOOR, prefill // 2)
        elif len(plan.work) > 1:
            self.works = len(plan.work) // 2
        else:
            return False
        return True

    def went_well(self) -> None:
        """A step is done."""
        if (self.tokens, self.works) == self._most:
            return
        self._good += 1
        if self._good >= RECOVERY:
            self._good = 0
            self.tokens = min(self._most[0], self.tokens * 2)
            self.works = min(self._most[1], self.works * 2)
