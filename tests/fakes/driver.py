"""Drives a Runner without a scheduler: page tables and StepPlans made by hand, as awkward as the test likes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from freetoken.core.types import SamplingParams
from freetoken.engine.assemble import Engine, assemble
from freetoken.engine.runner.runner import Runner
from freetoken.engine.step import Sampled, StepPlan, Work
from freetoken.plan.choices import Resolved

GREEDY = SamplingParams(temperature=0.0)
PAGE = 4  # tokens: small, so that short prompts cross pages


def resolved(weight_dtype: str = "float32", *, pages: int = 256, page_size: int = PAGE, threads: int = 1) -> Resolved:
    """A plan for tiny models."""
    return Resolved(
        device="cpu",
        weight_dtype="bfloat16" if weight_dtype == "bfloat16" else "float32",
        page_size=page_size,
        num_pages=pages,
        max_running_requests=16,
        max_prefill_tokens=512,
        max_seq_len=512,
        max_queued=16,
        queue_deadline_s=60.0,
        threads=threads,
    )


def engine(path: Path, weight_dtype: str = "float32", **plan: int) -> Engine:
    """The checkpoint at `path`, assembled; progress goes nowhere."""
    return assemble(path, resolved(weight_dtype, **plan), lambda *_: None, lambda: False)


@dataclass
class Generation:
    """One sequence: its tokens, its pages, and how many tokens the pages hold."""

    id: str
    tokens: list[int]
    sampling: SamplingParams = GREEDY
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    prompt_len: int = 0

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]


class Driver:
    """Allocates pages of one runner. `scattered`: never neighbours, in an order that the seed decides."""

    def __init__(self, runner: Runner, *, pages: int = 256, page_size: int = PAGE, scattered: bool = False) -> None:
        self.runner, self.page_size = runner, page_size
        self._free = list(range(pages))
        if scattered:
            random.Random(5).shuffle(self._free)

    def sequence(self, tokens: Sequence[int], sampling: SamplingParams = GREEDY, name: str = "a") -> Generation:
        return Generation(name, list(tokens), sampling)

    def work(self, sequence: Generation, count: int) -> Work:
        """The next `count` tokens that have no keys yet."""
        start, end = sequence.computed, sequence.computed + count
        while len(sequence.pages) * self.page_size < end:
            sequence.pages.append(self._free.pop(0))
        return Work(
            request_id=sequence.id,
            token_ids=tuple(sequence.tokens[start:end]),
            start=start,
            pages=tuple(sequence.pages),
            sample=end == len(sequence.tokens),
            sampling=sequence.sampling,
            history=tuple(sequence.tokens),
            prompt_len=sequence.prompt_len,
        )

    def step(self, parts: Sequence[tuple[Generation, int]]) -> dict[str, Sampled]:
        """One pass over (sequence, tokens of it); sampled tokens are appended."""
        plan = StepPlan(tuple(self.work(sequence, count) for sequence, count in parts))
        result = self.runner.run(plan)
        for sequence, count in parts:
            sequence.computed += count
            if sequence.id in result.sampled:
                sequence.tokens.append(result.sampled[sequence.id].token_id)
        return result.sampled

    def generate(self, sequences: Sequence[Generation], tokens: int, *, chunk: int = 512) -> list[list[int]]:
        """Prefill in chunks and decode, all sequences in the same steps; the output of each."""
        while waiting := [one for one in sequences if len(one.output) < tokens]:
            self.step([(one, min(chunk, len(one.tokens) - one.computed)) for one in waiting])
        return [one.output for one in sequences]

    def reuse(self, source: Generation, tokens: Sequence[int], name: str = "b") -> Generation:
        """A new sequence that shares the full pages of its common beginning with `source`, as a prefix hit does."""
        same = 0
        while same < min(len(tokens) - 1, source.computed) and tokens[same] == source.tokens[same]:
            same += 1
        pages = same // self.page_size
        hit = self.sequence(tokens, source.sampling, name)
        hit.pages, hit.computed = source.pages[:pages], pages * self.page_size
        return hit

    def logits(self, sequence: Generation, *, chunk: int = 512) -> torch.Tensor:
        """(vocab) f32 after the sequence's last token; its keys are written."""
        while True:
            work = self.work(sequence, min(chunk, len(sequence.tokens) - sequence.computed))
            row = self.runner.logits(StepPlan((work,)))
            sequence.computed = work.end
            if work.sample:
                return row[0]
