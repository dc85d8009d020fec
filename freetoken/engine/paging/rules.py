"""How much of each pool a sequence takes: one description of a model's storage, and the one demand made from it. Pure.

The door ("can it ever run?"), admission ("now?"), growth and reclaim all ask `Demand.fits` of what `Layout` counts, so
they cannot disagree by a page. Does not know pages by number, nor requests.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Demand:
    """An amount in each pool: what somebody needs, holds, or could have.

    Prefix snapshots are in no demand, for nobody needs one: a hit uses one that is there, and one more is taken only
    where there is room.
    """

    pages: int = 0  # of the full pool
    window: int = 0  # pages of the sliding-window pool
    states: int = 0  # recurrent states

    def fits(self, room: Demand) -> bool:
        """Whether `room` has this much in every pool."""
        return self.pages <= room.pages and self.window <= room.window and self.states <= room.states

    def beyond(self, held: Demand) -> Demand:
        """What is missing to somebody who holds `held`."""
        return Demand(
            max(0, self.pages - held.pages), max(0, self.window - held.window), max(0, self.states - held.states)
        )


@dataclass(frozen=True, slots=True)
class Layout:
    """What a model keeps of a sequence, by the kinds of mixer that it has. Lengths are in tokens.

    Every position has its place in a page of the full pool. Where layers with a sliding window have a pool of their
    own, only pages that a later position still sees are held there. A recurrent mixer has one state for each sequence.
    """

    page_size: int
    window: int | None = None  # positions that one sees, itself included; None: no layer has a window pool
    recurrent: bool = False

    def pages(self, tokens: int) -> int:
        """Pages that hold `tokens` positions."""
        return -(-tokens // self.page_size)

    def whole(self, tokens: int) -> int:
        """Pages that `tokens` positions fill: only those may be shared, a part-filled one is still written."""
        return tokens // self.page_size

    def hit(self, tokens: int) -> int:
        """Most pages a prompt of `tokens` may take from the cache: its last token must be computed for its logits."""
        return (tokens - 1) // self.page_size

    def slid(self, computed: int) -> int:
        """Pages in front that no position from `computed` on sees in a window."""
        return 0 if self.window is None else max(0, computed - self.window + 1) // self.page_size

    @property
    def tail(self) -> int:
        """Most window pages before a page boundary that positions behind it see."""
        return 0 if self.window is None else self.pages(self.window - 1)

    def step(self, start: int, end: int) -> Demand:
        """What a sequence holds while its positions `start` .. `end` - 1 are computed."""
        pages = self.pages(end)
        return Demand(pages, 0 if self.window is None else pages - self.slid(start), int(self.recurrent))

    def least(self, tokens: int, spare: int = 0) -> Demand:
        """What a sequence of `tokens` must be able to hold to get through, with `spare` pages for its output.

        In the window pool that does not grow with its length: pieces of a page see the tail, the page in which the
        tail begins where it is not a boundary, and their own.
        """
        pages = self.pages(tokens) + spare
        return Demand(pages, 0 if self.window is None else min(pages, self.tail + 2), int(self.recurrent))
