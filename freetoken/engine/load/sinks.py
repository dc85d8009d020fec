"""Where decoded numbers go: now into resident tensors, cast on the way. Does not know files or formats."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


class ResidentSink:
    """Canonical name -> a view in memory, filled row by row."""

    def __init__(self, destinations: Mapping[str, Tensor]) -> None:
        self._destinations = destinations

    def write(self, name: str, first_row: int, values: Tensor) -> None:
        """values (rows, ...) of any dtype -> rows first_row .. first_row + rows of `name`."""
        self._destinations[name][first_row : first_row + values.shape[0]].copy_(values)
