"""GET /registry/search, GET /registry/{repo}/variants, GET and PUT /registry/token."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from freetoken.daemon.downloads.credential import HubToken
from freetoken.daemon.handlers.context import reply
from freetoken.daemon.handlers.downloads import downloads


class TokenBody(BaseModel):
    """null forgets the token that is kept."""

    model_config = ConfigDict(extra="forbid")
    token: str | None = Field(max_length=512)


async def search(
    request: Request, q: Annotated[str, Query(max_length=200)], limit: Annotated[int, Query(ge=1, le=100)] = 20
) -> Response:
    """Models of the hub whose name has these words, the most downloaded first."""
    return reply({"models": await downloads(request).api.search(q, limit)})


async def variants(
    request: Request, repo: str, revision: Annotated[str, Query(min_length=1, max_length=200)] = "main"
) -> Response:
    """What a repository (`org--name`) lets be downloaded: a row for its model, one for each GGUF variant."""
    info, offers = await downloads(request).desk.offers(repo.replace("--", "/", 1), revision)
    rows = [
        {
            "model": offer.model,
            "format": offer.choice.format,
            "variant": offer.choice.variant,
            "bytes": offer.choice.bytes,
            "files": len(offer.choice.files),
        }
        for offer in offers
    ]
    return reply(
        {
            "repo": info.repo,
            "revision": info.commit,
            "gated": info.gated,
            "license": info.license,
            "variants": rows,
        }
    )


async def show_token(request: Request) -> Response:
    """Whether there is a token and where it comes from, never the token."""
    origin = _token(request).origin
    return reply({"set": origin is not None, "source": origin})


async def set_token(request: Request, body: TokenBody) -> Response:
    _token(request).set(body.token)
    return await show_token(request)


def _token(request: Request) -> HubToken:
    found: HubToken = request.app.state.hub_token
    return found
