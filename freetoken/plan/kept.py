"""What each kind of mixer keeps of a sequence from step to step: cache, window, state. Pure.

A table keyed by the mixer's class, never by family: a class without a line has no known size, and a model that has one
is not planned. Sizes are the definitions of the mixers in catalog.spec; their sources are named there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from freetoken.catalog.spec import Attention, IndexSpec, Latent, Pooled, Recurrent
from freetoken.plan.storage import FP32, Storage

PAGE = 16  # tokens


@dataclass(frozen=True, slots=True)
class Kept:
    """One layer's, in bytes."""

    page: int = 0  # of each page of the cache
    row: int = 0  # of each row of the sliding window
    window: int = 0  # rows that a query may see, itself among them
    state: int = 0  # of a running request, whatever its length; it cannot be cropped, so going back takes a snapshot


def kept_by(mixer: object, storage: Storage) -> Kept | None:
    """None where the size is not known."""
    found = _KINDS.get(type(mixer))
    return None if found is None else found(mixer, storage)


def _attention(mixer: Attention, storage: Storage) -> Kept:
    if mixer.kv_from is not None:
        return Kept()
    row = 2 * mixer.kv_heads * mixer.head_dim * storage.number
    if mixer.window is not None and storage.device == "cuda":
        return Kept(row=row, window=mixer.window)
    # on a CPU a window keeps full pages: memory is cheap there, and a window is a mask
    page, state = _index(mixer.index, storage)
    return Kept(page=PAGE * row + page, state=state)


def _latent(mixer: Latent, storage: Storage) -> Kept:
    page, state = _index(mixer.index, storage)
    return Kept(page=PAGE * (mixer.kv_rank + mixer.rope_dim) * storage.number + page, state=state)


def _recurrent(mixer: Recurrent, storage: Storage) -> Kept:
    matrix = mixer.value_heads * mixer.key_dim * mixer.value_dim * FP32  # in bf16 it loses 0.1 % in 256 steps
    channels = 2 * mixer.key_heads * mixer.key_dim + mixer.value_heads * mixer.value_dim
    return Kept(state=matrix + (mixer.conv - 1) * channels * storage.number)


def _pooled(mixer: Pooled, storage: Storage) -> Kept:
    row = mixer.head_dim * storage.number
    if not mixer.ratio:
        return Kept(row=row, window=mixer.window)
    channels = mixer.head_dim + (mixer.index.dim if mixer.index else 0)
    page = -(-PAGE * channels * storage.number // mixer.ratio)
    # rows and gates of the entry that is not complete; where windows overlap, those of the window before as well
    halves = 2 if mixer.index else 1
    partial = 2 * (mixer.ratio - 1) * halves * channels * FP32
    previous = 2 * mixer.ratio * channels * FP32 if mixer.index else 0
    return Kept(page=page, row=row, window=mixer.window, state=partial + previous)


def _index(index: IndexSpec | None, storage: Storage) -> tuple[int, int]:
    """(bytes of a page, of a running request)."""
    if index is None or index.reuse is not None:
        return 0, 0
    key = index.dim * storage.number
    if index.pick != "block_mean":
        return PAGE * key, 0
    return -(-PAGE * key // index.block), (index.block - 1) * key  # means of whole blocks, and the rows of the last


_KINDS: Mapping[type, Callable[..., Kept]] = {
    Attention: _attention,
    Latent: _latent,
    Recurrent: _recurrent,
    Pooled: _pooled,
}
