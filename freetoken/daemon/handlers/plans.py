"""POST /plans: what a load would need and whether it fits, without loading."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from freetoken.core.units import Bytes
from freetoken.daemon.forecast import forecast
from freetoken.daemon.handlers.context import context, reply
from freetoken.plan.report import to_json
from freetoken.settings.load import parse_options

LARGEST = 1 << 50  # bytes; no machine that is described has more


class MachineBody(BaseModel):
    """A machine other than this one. `vram_bytes` are the free bytes of a GPU, `ram_bytes` those of the host."""

    model_config = ConfigDict(extra="forbid")
    vram_bytes: int | None = Field(default=None, ge=0, le=LARGEST)
    ram_bytes: int | None = Field(default=None, ge=0, le=LARGEST)


class PlanBody(BaseModel):
    """`model` and `options` as POST /engine/load takes them."""

    model_config = ConfigDict(extra="forbid")
    model: str = Field(min_length=1, max_length=4096)
    options: dict[str, Any] = Field(default_factory=dict)
    machine: MachineBody = Field(default_factory=MachineBody)


async def create(request: Request, body: PlanBody) -> Response:
    """200 and the plan JSON, whether or not it fits: that it does not is an answer."""
    here = context(request)
    row = here.shelf.locate(body.model)
    vram, ram = (None if size is None else Bytes(size) for size in (body.machine.vram_bytes, body.machine.ram_bytes))
    options = parse_options(body.options)
    plan = await asyncio.to_thread(forecast, row.path, options, vram, ram)
    document = to_json(plan)
    here.hub.publish("plan.created", document, subject=row.id)
    return reply(document)
