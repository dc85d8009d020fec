"""Rotary embedding (arXiv 2104.09864) of one part of a head's channels, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, tail: bool = False) -> Tensor:
    """x (tokens, heads, head_dim) f32 with its first (or last) `dim` channels rotated.

    cos, sin (tokens, 1, dim) f32 as `half_split` or `pairwise` lay them out: sin carries the sign, so a pair (a, b)
    becomes (a cos - b sin, b cos + a sin).
    """
    dim = cos.shape[-1]
    if dim == x.shape[-1]:
        return _turn(x, cos, sin, interleaved)
    if tail:
        return torch.cat((x[..., :-dim], _turn(x[..., -dim:], cos, sin, interleaved)), dim=-1)
    return torch.cat((_turn(x[..., :dim], cos, sin, interleaved), x[..., dim:]), dim=-1)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    # (tokens, heads, dim): every channel's partner in its place
    partner = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if interleaved else x.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(x * cos, partner, sin)


def lay_out(angles: Tensor, factor: float, *, interleaved: bool) -> tuple[Tensor, Tensor]:
    """angles (tokens, dim / 2) f32 -> (cos, sin) for `rotate`, each (tokens, 1, dim) f32 and times `factor`.

    Half split: channel i pairs with i + dim / 2. Interleaved: 2i with 2i + 1.
    """
    cos, sin = angles.cos() * factor, angles.sin() * factor
    if interleaved:
        return cos.repeat_interleave(2, -1)[:, None], torch.stack((-sin, sin), -1).flatten(-2)[:, None]
    return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]
