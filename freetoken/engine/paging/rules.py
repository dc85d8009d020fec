"""How much of the pools a sequence takes, by mixer kind: a table from kind to rule. Pure.

Does not know pages by number. A kind with other storage (a window ring, a recurrent state) is another row here.
"""

from __future__ import annotations

from dataclasses import dataclass

from freetoken.core.registry import Registry


@dataclass(frozen=True, slots=True)
class Paged:
    """Every position's keys and values stay, `page_size` of them to a page."""

    page_size: int  # tokens

    def pages(self, tokens: int) -> int:
        """Pages that hold `tokens` positions."""
        return -(-tokens // self.page_size)

    def whole(self, tokens: int) -> int:
        """Pages that `tokens` positions fill: only those may be shared, a part-filled one is still written."""
        return tokens // self.page_size

    def hit(self, tokens: int) -> int:
        """Most pages a prompt of `tokens` may take from the cache: its last token must be computed for its logits."""
        return (tokens - 1) // self.page_size


RULES = Registry("mixer kind", {"attention": Paged})
