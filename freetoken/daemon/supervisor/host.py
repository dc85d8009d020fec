"""The supervisor as the data API sees it: api.host.ModelHost.

Turns "this model, please" into a model that answers, a wait, or the reason why not and what to do. Does not load
anything by itself.
"""

from __future__ import annotations

import time

from freetoken.api.host import LoadedModel, ModelListing
from freetoken.core.errors import DeadlineExceeded, ModelNotLoaded
from freetoken.daemon.shelf import Shelf
from freetoken.daemon.state import EngineStatus
from freetoken.daemon.supervisor.actor import Supervisor


class Host:
    """Implements ModelHost."""

    def __init__(self, supervisor: Supervisor, shelf: Shelf, load_deadline_s: float) -> None:
        self._supervisor = supervisor
        self._shelf = shelf
        self._deadline_s = load_deadline_s

    async def resolve(self, model_id: str) -> LoadedModel:
        """See ModelHost. DeadlineExceeded where the load goes on for longer than load_deadline_s."""
        deadline = time.monotonic() + self._deadline_s
        while True:
            running = self._supervisor.running
            if running is not None and running.model.id == model_id:
                return running.model
            if not self._supervisor.awaits(model_id):
                raise self._not_loaded(model_id)
            left = deadline - time.monotonic()
            if left <= 0 or not await self._supervisor.settled(left):
                raise DeadlineExceeded(
                    f"{model_id} was still loading after {self._deadline_s:g} s.", fixes=("Try again later",)
                )

    def listing(self) -> list[ModelListing]:
        """Every complete model, and what is loaded where it is no longer on the shelf."""
        running = self._supervisor.running
        loaded = running.model.id if running else None
        rows = {row.id: row for row in self._shelf.rows()}
        if running is not None:
            rows.setdefault(running.model.id, running.wish.row)
        return [ModelListing(row.id, row.created, row.id == loaded) for row in rows.values()]

    def _not_loaded(self, model_id: str) -> ModelNotLoaded:
        """Raises ModelNotFound itself where the id is not known at all."""
        row = self._shelf.find(model_id)
        state, running = self._supervisor.state, self._supervisor.running
        because = f"; {running.model.id} is" if running else ""
        if state.state is EngineStatus.FAILED and state.model == row.id and state.failure:
            because = f": {str(state.failure['detail']).rstrip('.')}"
        return ModelNotLoaded(f"{row.id} is not loaded{because}.", fixes=(f"ft load {row.id}",), param="model")
