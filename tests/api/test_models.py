"""The model list, single models, and what /v1 says about everything else."""

from __future__ import annotations

import openai
import pytest

from tests.api.conftest import Service


def test_list(service: Service, client: openai.OpenAI) -> None:
    rows = {row.id: row for row in client.models.list()}
    assert set(rows) == {"org/tiny", "org/other"}
    assert rows["org/tiny"].loaded is True and rows["org/other"].loaded is False
    assert rows["org/tiny"].object == "model" and rows["org/tiny"].created == 1_700_000_000


def test_one_model_by_id_and_by_path_form(service: Service, client: openai.OpenAI) -> None:
    assert client.models.retrieve("org/tiny").id == "org/tiny"
    assert client.models.retrieve("org--tiny").id == "org/tiny"
    assert service.http.get(f"{service.url}/v1/models/org/tiny").json()["id"] == "org/tiny"


def test_unknown_model(service: Service, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("org/none")
    assert caught.value.code == "model_not_found" and "org/tiny" in caught.value.message


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/chat/completions", 405, "METHOD_NOT_ALLOWED"),
        ("DELETE", "/v1/models/org/tiny", 405, "METHOD_NOT_ALLOWED"),
        ("POST", "/v1/messages/count_tokens?beta=true", 404, "ROUTE_NOT_FOUND"),  # never a 200 with junk
        ("GET", "/v1/", 404, "ROUTE_NOT_FOUND"),
        ("PUT", "/v1/nothing", 404, "ROUTE_NOT_FOUND"),
    ],
)
def test_other_paths_and_methods(service: Service, method: str, path: str, status: int, code: str) -> None:
    reply = service.http.request(method, service.url + path)
    assert (reply.status_code, reply.json()["error"]["freetoken_code"]) == (status, code)
