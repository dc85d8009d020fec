"""The supervisor as the data API sees it: api.host.ModelHost.

Turns "this model, please" into a model that answers, a wait, or the reason why not and what to do. Loads a model only
where the setting autoload allows it.
"""

from __future__ import annotations

import time

from freetoken.api.host import LoadedModel, ModelListing
from freetoken.core.errors import DeadlineExceeded, EngineDied, FreeTokenError, ModelNotLoaded, from_code
from freetoken.daemon.operations import Operations
from freetoken.daemon.shelf import Shelf
from freetoken.daemon.state import EngineStatus, OperationState
from freetoken.daemon.supervisor.actor import Supervisor
from freetoken.settings.schema import Settings

REFUSED_S = 60.0  # a load that a request has set off in vain is not tried again before


class Host:
    """Implements ModelHost."""

    def __init__(self, supervisor: Supervisor, shelf: Shelf, operations: Operations, settings: Settings) -> None:
        self._supervisor, self._shelf, self._operations = supervisor, shelf, operations
        self._deadline_s, self._autoload = settings.load_deadline_s, settings.autoload
        self._refused: dict[str, tuple[float, FreeTokenError]] = {}  # model -> until (monotonic), why

    async def resolve(self, model_id: str) -> LoadedModel:
        """See ModelHost. EngineDied while an engine that died is started again, DeadlineExceeded after load_deadline_s.

        With autoload, whatever a load can raise.
        """
        deadline = time.monotonic() + self._deadline_s
        while True:
            running = self._supervisor.running
            leaving = running is not None and (running.gone or (self._autoload and running.process.ending))
            if running is not None and running.model.id == model_id and not leaving:
                return running.model
            self._check_not_lost(model_id)
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded(
                    f"{model_id} was still not loaded after {self._deadline_s:g} s.", fixes=("Try again later",)
                )
            await self._come_nearer(model_id, left)

    async def _come_nearer(self, model_id: str, within_s: float) -> None:
        """Waits for the work that leads to the model, or begins it. Raises where nothing does."""
        if self._supervisor.awaits(model_id):
            await self._supervisor.settled(within_s)
            return
        refusal = self._not_loaded(model_id)  # an unknown id is refused in any case
        if not self._autoload or self._gave_up(model_id):
            raise refusal
        if self._supervisor.busy:
            await self._supervisor.settled(within_s)
            return
        until, error = self._refused.get(model_id, (0.0, refusal))
        if time.monotonic() < until:
            raise from_code(error.code, error.detail, error.numbers)
        await self._load(model_id, within_s)

    async def _load(self, model_id: str, within_s: float) -> None:
        """In the place of what is loaded now, once that has answered whom it is answering."""
        operation = self._supervisor.switch(model_id, {}, drain_s=within_s)
        if operation is None:
            return
        done = await self._operations.wait(operation.id, within_s)
        if done.state is OperationState.FAILED and done.error is not None:
            error = from_code(done.error["code"], done.error["detail"], done.error["numbers"])
            self._refused[model_id] = (time.monotonic() + REFUSED_S, error)
            raise error
        if done.state is OperationState.CANCELLED:
            raise self._not_loaded(model_id)

    def listing(self) -> list[ModelListing]:
        """Every complete model, and what is loaded where it is no longer on the shelf."""
        running = self._supervisor.running
        loaded = running.model.id if running else None
        rows = {row.id: row for row in self._shelf.rows()}
        if running is not None:
            rows.setdefault(running.model.id, running.wish.row)
        return [ModelListing(row.id, row.created, row.id == loaded) for row in rows.values()]

    def _check_not_lost(self, model_id: str) -> None:
        back_in_s = self._supervisor.back_in_s(model_id)
        if back_in_s is not None:
            raise EngineDied(
                f"The engine of {model_id} died and is being started again.",
                numbers={"retry_after_s": round(back_in_s, 1)},
                fixes=(f"Try again in {max(1, round(back_in_s))} s.",),
                retry_after_s=max(1.0, back_in_s),
            )

    def _gave_up(self, model_id: str) -> bool:
        """Whether its engine failed and nobody has asked for it since: a request must not set off the next failure."""
        state = self._supervisor.state
        return state.state is EngineStatus.FAILED and state.model == model_id

    def _not_loaded(self, model_id: str) -> ModelNotLoaded:
        """Raises ModelNotFound itself where the id is not known at all."""
        row = self._shelf.find(model_id)
        state, running = self._supervisor.state, self._supervisor.running
        because = f"; {running.model.id} is" if running else ""
        if state.state is EngineStatus.FAILED and state.model == row.id and state.failure:
            because = f": {str(state.failure['detail']).rstrip('.')}"
        return ModelNotLoaded(f"{row.id} is not loaded{because}.", fixes=(f"ft load {row.id}",), param="model")
