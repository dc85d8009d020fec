"""GET and POST /downloads, GET /downloads/{id}, POST /downloads/{id}/pause, /resume and /cancel."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from freetoken.daemon.downloads.jobs import Downloads
from freetoken.daemon.downloads.order import Order
from freetoken.daemon.handlers.context import reply


class DownloadBody(BaseModel):
    """Either `model` (`org/name`, `org/name:VARIANT`) at a revision, or the `url` of a .gguf file on an allowed host.

    `dry_run` answers with bytes, files and free disk, and downloads nothing. No path is taken: a model goes to models/.
    """

    model_config = ConfigDict(extra="forbid")
    model: str | None = Field(default=None, min_length=1, max_length=300)
    revision: str = Field(default="main", min_length=1, max_length=200)
    url: str | None = Field(default=None, min_length=1, max_length=2000)
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    dry_run: bool = False


def downloads(request: Request) -> Downloads:
    found: Downloads = request.app.state.downloads
    return found


async def index(request: Request) -> Response:
    return reply({"downloads": downloads(request).index()})


async def start(request: Request, body: DownloadBody) -> Response:
    """202 and the download, new, joined or resumed; 200 where the model is there already, or for a dry run."""
    order = Order(model=body.model, revision=body.revision, url=body.url, sha256=body.sha256)
    if body.dry_run:
        return reply(await downloads(request).dry_run(order))
    view = await downloads(request).start(order)
    return reply(view, 200 if view["state"] == "completed" else 202)


async def show(request: Request, id: str) -> Response:
    return reply(downloads(request).show(id))


async def pause(request: Request, id: str) -> Response:
    return reply(await downloads(request).pause(id))


async def resume(request: Request, id: str) -> Response:
    return reply(downloads(request).resume(id), 202)


async def cancel(request: Request, id: str) -> Response:
    return reply(await downloads(request).cancel(id))
