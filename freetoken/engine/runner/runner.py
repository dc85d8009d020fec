"""Does what a StepPlan says: one forward pass, then a token for every work that wants one.

Owns the KV caches. Does not know requests, queues or how pages are shared.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from freetoken.engine.kv.base import KvCache
from freetoken.engine.models.build import Model
from freetoken.engine.runner.inputs import prepare
from freetoken.engine.runner.sampler import Sampler
from freetoken.engine.step import StepPlan, StepResult


class Runner:
    """One model on one device. Not thread-safe: the loop's thread calls it."""

    def __init__(self, model: Model, caches: Sequence[KvCache], page_size: int) -> None:
        self._model, self._caches, self._page_size = model, caches, page_size
        self._sampler = Sampler(model.spec.embed.vocab)

    def run(self, plan: StepPlan) -> StepResult:
        """Compute `plan`: its tokens' keys and values are in their pages when this returns."""
        started = time.perf_counter_ns()
        with torch.inference_mode():
            logits = self.logits(plan)  # (rows, vocab) f32
            wanted = [work for work in plan.work if work.sample]
            sampled = dict(zip((work.request_id for work in wanted), self._sampler(logits, wanted), strict=True))
        return StepResult(sampled=sampled, forward_ns=time.perf_counter_ns() - started)

    def logits(self, plan: StepPlan) -> torch.Tensor:
        """(works with `sample`, vocab) f32: what `run` samples from."""
        with torch.inference_mode():
            return self._model.decoder(prepare(plan, self._model.ropes, self._page_size), self._caches)

    def clear(self) -> None:
        """Forget what was counted. Pages keep their numbers: nobody reads a page that he has not written."""
        self._model.decoder.clear_counts()

    def close(self) -> None:
        """Free weights and caches."""
        del self._model, self._caches

    def expert_tokens(self) -> tuple[tuple[int, ...], ...]:
        """Tokens routed since the load, by routed layer and expert; in the last layer only those that are sampled."""
        return self._model.decoder.expert_tokens()
