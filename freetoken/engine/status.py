"""The counters that the engine reports once a second: totals as they are, rates over the time since the last report.

Does not know who reads them.
"""

from __future__ import annotations

from dataclasses import replace

import psutil

from freetoken.core.ports import Clock
from freetoken.engine.scheduler.scheduler import Scheduler
from freetoken.wire.messages import Stats


class Meter:
    def __init__(self, scheduler: Scheduler, clock: Clock) -> None:
        self._scheduler, self._clock = scheduler, clock
        self._process = psutil.Process()
        self._last_s = clock.monotonic()
        self._last = replace(scheduler.totals)

    def stats(self, expert_tokens: tuple[tuple[int, ...], ...]) -> Stats:
        """One report. `expert_tokens` counts by routed layer and expert."""
        now, totals, pages = self._clock.monotonic(), self._scheduler.totals, self._scheduler.pages
        elapsed_s = max(now - self._last_s, 1e-3)
        report = Stats(
            running=self._scheduler.running,
            queued=self._scheduler.queued,
            pages_total=pages.total,
            pages_free=pages.free,
            pages_cached=pages.cached,
            prompt_tokens=totals.prompt,
            output_tokens=totals.output,
            cached_tokens=totals.cached,
            decode_tok_s=round((totals.output - self._last.output) / elapsed_s, 1),
            prefill_tok_s=round((totals.prefilled - self._last.prefilled) / elapsed_s, 1),
            rss_bytes=self._process.memory_info().rss,
            layers_routed=len(expert_tokens),
            experts=len(expert_tokens[0]) if expert_tokens else 0,
            expert_tokens=expert_tokens,
        )
        self._last_s, self._last = now, replace(totals)
        return report
