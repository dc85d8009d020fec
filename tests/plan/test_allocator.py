"""A plan run against an allocator that rounds, caches and fragments never takes more than was predicted."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freetoken.catalog.expected import expected
from freetoken.catalog.spec import ModelSpec
from freetoken.core.units import Bytes
from freetoken.plan import memory
from freetoken.plan.choices import Requested
from freetoken.plan.footprint import Footprint, Part
from freetoken.plan.hardware import Gpu, Machine
from freetoken.plan.ledger import Plan
from freetoken.plan.placement import plan_footprints
from freetoken.plan.storage import storage
from tests.fakes import models
from tests.fakes.allocator import MIB, CachingAllocator

GIB = 1 << 30
MODELS = {"qwen3-30b": models.qwen3_30b_a3b(), "qwen3.6-35b": models.qwen3_6_35b_a3b()}
FOOTPRINTS = {name: memory.footprint(spec, storage("cuda", "bfloat16")) for name, spec in MODELS.items()}


def planned(name: str, vram: int, requested: Requested) -> Plan:
    gpu = Gpu("GPU-0", "card", Bytes(vram), Bytes(vram))
    machine = Machine(Bytes(256 * GIB), Bytes(256 * GIB), 8, (gpu,))
    return plan_footprints({"bfloat16": FOOTPRINTS[name]}, requested, machine)


def weight_sizes(spec: ModelSpec) -> Iterator[int]:
    """Bytes of each tensor that stays in VRAM: matrices in bf16, routers and vectors in fp32."""
    for name, shape in expected(spec).items():
        if not (".experts." in name and name.split(".experts.")[1][0].isdigit()):
            fp32 = len(shape) < 2 or ".router." in name or ".conv." in name
            yield prod(shape) * (4 if fp32 else 2)


def line(plan: Plan, name: str) -> int:
    return sum(line.bytes for line in plan.ledger if line.line == name)


class Engine:
    """What an engine takes of a card, in its order: weights, pools, workspaces; then steps."""

    def __init__(self, name: str, plan: Plan) -> None:
        assert plan.resolved is not None
        self.model: Footprint = FOOTPRINTS[name]
        self.plan, self.resolved = plan, plan.resolved
        self.allocator = CachingAllocator()
        for size in weight_sizes(MODELS[name]):
            self.allocator.take(size)
        experts = self.model.experts
        assert experts is not None
        pages = (self.resolved.num_pages + 1) * self.model.page_bytes
        layers = len(MODELS[name].layers)
        pools = [experts.slot_bytes * self.resolved.expert_slots // 3] * 3 + [pages // layers] * layers
        lasting = ("state", "snapshots", "attention_workspace", "graphs", "cpu_staging")
        for size in (*pools, *(line(plan, name) for name in lasting)):
            self.allocator.take(size)
        self.allocator.take(memory.BLAS)

    def step(self, parts: list[Part], tokens: int, rows: int) -> None:
        """One forward pass: its parts come in this order, and all are there at the worst moment."""
        context = self.resolved.max_seq_len
        sizes = [part.bytes(tokens + rows, context) for part in parts]
        if tokens > 1 and self.model.experts is not None:
            sizes += [self.model.experts.layer_bytes] * self.resolved.staging_buffers
        taken = [self.allocator.take(size) for size in sizes]
        taken.append(self.allocator.take(line(self.plan, "logits")))
        for handle in taken:
            self.allocator.give(handle)

    @property
    def allowed(self) -> int:
        return self.plan.total - line(self.plan, "cuda_context")  # the rest is torch's


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    name=st.sampled_from(sorted(MODELS)),
    vram=st.integers(10, 80).map(lambda gib: gib * GIB),
    running=st.integers(1, 8),
    data=st.data(),
)
def test_no_order_of_steps_takes_more_than_was_predicted(
    name: str, vram: int, running: int, data: st.DataObject
) -> None:
    plan = planned(name, vram, Requested(max_running_requests=running))
    if plan.resolved is None:
        return
    engine = Engine(name, plan)
    lengths = st.one_of(st.just(plan.resolved.max_prefill_tokens), st.integers(1, plan.resolved.max_prefill_tokens))
    for tokens in data.draw(st.lists(lengths, min_size=1, max_size=6)):
        engine.step(data.draw(st.permutations(engine.model.prefill)), tokens, running)
    assert engine.allocator.reserved <= engine.allowed


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_largest_step_uses_most_of_what_was_predicted(name: str) -> None:
    """Or a plan that is ten times too large would pass, too."""
    plan = planned(name, 24 * GIB, Requested())
    assert plan.resolved is not None
    engine = Engine(name, plan)
    engine.step(list(engine.model.prefill), plan.resolved.max_prefill_tokens, plan.resolved.max_running_requests)
    assert 0.95 * engine.allowed <= engine.allocator.reserved <= engine.allowed


def test_the_allocator_rounds_caches_and_fragments() -> None:
    allocator = CachingAllocator()
    small = allocator.take(1)
    assert (allocator.live, allocator.reserved) == (512, 2 * MIB)
    first, second, third = (allocator.take(8 * MIB) for _ in range(3))
    assert allocator.reserved == 2 * MIB + 40 * MIB
    allocator.give(first)
    allocator.give(third)
    assert allocator.live == 512 + 8 * MIB and allocator.reserved == 42 * MIB, "what is freed is kept"
    allocator.take(20 * MIB)
    assert allocator.reserved == 42 * MIB, "the third block joined the free end: 8 + 16"
    allocator.take(9 * MIB)
    assert allocator.reserved == 62 * MIB, "the hole of 8 MiB is of no use"
    allocator.give(small)
    allocator.give(second)
