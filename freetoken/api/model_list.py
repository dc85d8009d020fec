"""GET /v1/models and /v1/models/{id}: every complete model, loaded or not. Pure.

Facts: the OpenAI API reference, "Models"; `loaded` is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from freetoken.api.host import ModelListing
from freetoken.core.errors import ModelNotFound


def model_list(listing: Sequence[ModelListing]) -> dict[str, Any]:
    return {"object": "list", "data": [_model(row) for row in listing]}


def one_model(listing: Sequence[ModelListing], model_id: str) -> dict[str, Any]:
    """`model_id` as it is, or with `--` for `/` as paths write it. Raises ModelNotFound."""
    for row in listing:
        if model_id in (row.id, row.id.replace("/", "--")):
            return _model(row)
    known = ", ".join(row.id for row in listing) or "none"
    raise ModelNotFound(f"There is no model {model_id!r} here; known: {known}.", param="model")


def _model(row: ModelListing) -> dict[str, Any]:
    return {"id": row.id, "object": "model", "created": row.created, "owned_by": "freetoken", "loaded": row.loaded}
