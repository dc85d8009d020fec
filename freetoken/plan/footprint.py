"""What one model needs, as sizes: the ledger's lines as functions of the few things that can still be chosen. Pure.

A line is a Term (bytes, and bytes for each running request); KV pages, expert slots and the prefill transient have
their own shapes. Where the numbers come from is somebody else's business: memory.py works them out from a ModelSpec,
a test writes them down. All are bytes as allocated. Does not know machines, budgets or what was asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Basis = Literal["measured", "computed", "assumed"]
LINES = (
    "weights",
    "expert_slots",
    "kv_pages",
    "state",
    "snapshots",
    "attention_workspace",
    "prefill_transient",
    "logits",
    "graphs",
    "allocator",
    "cuda_context",
    "cpu_staging",
    "other_processes",
    "reserve",
)
"""The ledger's lines in the order they are shown."""


@dataclass(frozen=True, slots=True)
class Term:
    """`fixed + per_request * running requests` bytes of the ledger line `line`."""

    line: str
    fixed: int
    per_request: int = 0
    basis: Basis = "computed"
    detail: str = ""

    def bytes(self, running: int) -> int:
        return self.fixed + self.per_request * running


@dataclass(frozen=True, slots=True)
class Part:
    """A named part of the prefill transient: a + b * tokens + c * context + d * tokens * context bytes."""

    name: str
    fixed: int = 0
    per_token: int = 0
    per_context: int = 0
    per_token_context: int = 0

    def bytes(self, tokens: int, context: int) -> int:
        return (
            self.fixed
            + self.per_token * tokens
            + self.per_context * context
            + self.per_token_context * tokens * context
        )


@dataclass(frozen=True, slots=True)
class Experts:
    """The routed experts of a model whose experts may be elsewhere than the rest."""

    layers: int
    per_layer: int
    top_k: int
    slot_bytes: int  # one expert in VRAM, padded as allocated
    bank_bytes: int  # one expert in host memory
    minimum: int | None = None  # slots below which the backend cannot run; None: one layer's routed set

    @property
    def count(self) -> int:
        return self.layers * self.per_layer

    @property
    def layer_bytes(self) -> int:
        """One staging buffer: every expert of one layer."""
        return self.per_layer * self.slot_bytes

    def least(self, running: int) -> int:
        """Fewest slots that `running` requests can decode with: what they route to in one layer."""
        if self.minimum is not None:
            return min(self.minimum, self.count)
        return min(self.per_layer, self.top_k * running)


@dataclass(frozen=True, slots=True)
class Work:
    """What computing costs: for the expected speed, not for the ledger."""

    read_bytes: int  # weights read for one decoded token; where `experts` are apart, without them
    params: int  # active parameters of a token, experts included
    layers: int
    expert_params: int = 0  # of `params`, those of routed experts


@dataclass(frozen=True, slots=True)
class Footprint:
    """Everything the planner needs to know of a model on one kind of device."""

    terms: tuple[Term, ...]
    page_size: int  # tokens
    page_bytes: int  # of one page over all layers; 0: the model keeps no KV pages
    window: int  # trained context, tokens
    work: Work
    prefill: tuple[Part, ...] = ()  # staging of experts is not among them: it is chosen
    experts: Experts | None = None  # None: a dense model, or all experts are among the weights
    host: tuple[Term, ...] = ()  # memory of the host beside the experts' banks, where the device has its own
    chunks: tuple[int, ...] = (8192, 4096, 2048, 1024, 512, 256)  # prefill chunks to choose from, in falling order
    unknown: tuple[str, ...] = ()  # what could not be worked out: such a model is not planned
    notes: tuple[str, ...] = ()  # what the figures rest on, for people
    resolved: tuple[tuple[str, int], ...] = ()  # (Resolved's field, value per running request) of state pools

    @property
    def token_bytes(self) -> int:
        """Of one cached token, rounded up."""
        return -(-self.page_bytes // self.page_size)

    def pages(self, tokens: int) -> int:
        """Pages that hold `tokens`."""
        return -(-tokens // self.page_size)

    def weights(self) -> int:
        """The weights' lines alone, at one running request."""
        return sum(term.bytes(1) for term in self.terms if term.line == "weights")

    def fixed(self, running: int) -> int:
        """Every term: what is there whatever is chosen for pages, slots and chunk."""
        return sum(term.bytes(running) for term in self.terms)

    def transient(self, tokens: int, context: int) -> int:
        """The prefill transient of a step of `tokens` behind `context` cached tokens, without staging."""
        return sum(part.bytes(tokens, context) for part in self.prefill)
