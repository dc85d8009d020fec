"""Every expert of one layer in host memory, one tensor a matrix.

The gate and up matrices of an expert are neighbours, so one product gives both. Does not know who computes with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ExpertBank:
    """The experts of one routed layer, resident."""

    gate_up: Tensor  # (experts, 2 * width, hidden) f32 or bf16
    down: Tensor  # (experts, hidden, width) f32 or bf16
    gate_up_bias: Tensor | None  # (experts, 2 * width) f32
    down_bias: Tensor | None  # (experts, hidden) f32

    @classmethod
    def allocate(
        cls, experts: int, hidden: int, width: int, *, bias: bool, dtype: torch.dtype, together: bool = False
    ) -> ExpertBank:
        """An unfilled bank. `together`: every token takes every expert, so the down matrices lie side by side and one
        product sums over all of them; else each expert's is one block of memory."""
        if together:
            down = torch.empty(hidden, experts, width, dtype=dtype).permute(1, 0, 2)
        else:
            down = torch.empty(experts, hidden, width, dtype=dtype)
        return cls(
            gate_up=torch.empty(experts, 2 * width, hidden, dtype=dtype),
            down=down,
            gate_up_bias=torch.empty(experts, 2 * width) if bias else None,
            down_bias=torch.empty(experts, hidden) if bias else None,
        )

    @property
    def experts(self) -> int:
        return int(self.gate_up.shape[0])

    @property
    def width(self) -> int:
        return int(self.down.shape[2])

    def views(self) -> Iterator[tuple[str, Tensor]]:
        """(name below the layer's experts, the view that holds it) for every weight."""
        for e in range(self.experts):
            yield f"{e}.gate.weight", self.gate_up[e, : self.width]
            yield f"{e}.up.weight", self.gate_up[e, self.width :]
            yield f"{e}.down.weight", self.down[e]
            if self.gate_up_bias is not None and self.down_bias is not None:
                yield f"{e}.gate.bias", self.gate_up_bias[e, : self.width]
                yield f"{e}.up.bias", self.gate_up_bias[e, self.width :]
                yield f"{e}.down.bias", self.down_bias[e]
