"""Rotary embeddings of a model: frequencies from a RopeSpec, cos and sin once a step, shared by all its layers.

Sources: rotary embedding arXiv 2104.09864; linear scaling arXiv 2306.15595; yarn arXiv 2309.00071; the llama3 rule from
Llama 3.1's reference code; longrope arXiv 2402.13753.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from freetoken_kernels.reference.rope import lay_out, rotate
from torch import Tensor

from freetoken.catalog.spec import RopeScaling, RopeSpec


@dataclass(frozen=True, slots=True)
class Rotation:
    """One rope at a step's positions."""

    cos: Tensor  # (tokens, 1, dim) f32
    sin: Tensor  # (tokens, 1, dim) f32, signed
    interleaved: bool
    tail: bool

    def __call__(self, x: Tensor) -> Tensor:
        """x (tokens, heads, head_dim) f32, rotated."""
        return rotate(x, self.cos, self.sin, interleaved=self.interleaved, tail=self.tail)


class Ropes:
    """All ropes of a model. `context` (tokens) is the longest sequence planned: longrope chooses its factors by it,
    once per load, because cached keys would be stale if they changed later."""

    def __init__(self, specs: Mapping[str, RopeSpec], context: int) -> None:
        self._ropes = {name: (spec, inverse_frequencies(spec, context)) for name, spec in specs.items()}

    def at(self, positions: Tensor) -> dict[str, Rotation]:
        """positions (tokens) i64 -> each rope's rotation there."""
        column = positions.float()[:, None]
        rotations = {}
        for name, (spec, frequencies) in self._ropes.items():
            cos, sin = lay_out(column * frequencies, spec.attn_factor, interleaved=spec.interleaved)
            rotations[name] = Rotation(cos, sin, spec.interleaved, spec.tail)
        return rotations


def inverse_frequencies(spec: RopeSpec, context: int = 0) -> Tensor:
    """(dim / 2) f32: radians a position, after scaling."""
    exponents = torch.arange(0, spec.dim, 2).float() / spec.dim
    frequencies = 1.0 / spec.theta**exponents
    if spec.pairs is not None:
        frequencies[spec.pairs :] = 0.0
    scaling = spec.scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling)
    if scaling.kind == "yarn":
        return _yarn(frequencies, spec, scaling)
    if scaling.kind == "longrope":
        extension = scaling.long if context > scaling.original else scaling.short
        return frequencies / torch.tensor(extension)
    return frequencies / scaling.factor  # linear, proportional


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Waves longer than original / low are stretched, those shorter than original / high kept, a ramp between."""
    wave = 2 * math.pi / frequencies  # tokens
    kept = ((scaling.original / wave - scaling.low) / (scaling.high - scaling.low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def _yarn(frequencies: Tensor, spec: RopeSpec, scaling: RopeScaling) -> Tensor:
    """Channels that turn more than beta_fast times in the original context are kept, fewer than beta_slow stretched."""

    def channel(turns: float) -> float:
        return spec.dim * math.log(scaling.original / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    if low == high:
        high += 0.001  # a step, not a division by zero
    stretched = ((torch.arange(spec.dim // 2).float() - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies / scaling.factor * stretched + frequencies * (1 - stretched)
