"""From a StepPlan to tensors: the tokens of all its work in one row of ids, with their positions and pages."""

from __future__ import annotations

import torch

from freetoken.engine.attention.base import Run, Spans
from freetoken.engine.layers.module import Inputs
from freetoken.engine.layers.rope import Ropes
from freetoken.engine.step import StepPlan


def prepare(plan: StepPlan, ropes: Ropes, page_size: int) -> Inputs:
    """The plan's work in its order; `rows` are the last tokens of the work that wants a sample."""
    runs, rows, first = [], [], 0
    for work in plan.work:
        runs.append(Run(first, len(work.token_ids), work.start, work.pages))
        first += len(work.token_ids)
        if work.sample:
            rows.append(first - 1)
    positions = torch.cat([torch.arange(run.start, run.start + run.length) for run in runs])  # (tokens) i64
    return Inputs(
        token_ids=torch.tensor([token for work in plan.work for token in work.token_ids]),
        rotations=ropes.at(positions),
        spans=Spans(runs, page_size),
        rows=torch.tensor(rows, dtype=torch.long),
    )
