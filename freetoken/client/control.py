"""Typed client of the control API; the command line uses nothing else to talk to a daemon.

Every call has a deadline and every refusal arrives as the typed error of core.errors. Proxies of the environment are
not used: the daemon is on this machine. Does not know terminals; knows neither the daemon's nor the engine's inside.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import msgspec

from freetoken.client import chat, sse
from freetoken.client.discovery import Address
from freetoken.client.views import Event, Live, Operation, Problem
from freetoken.core.errors import (
    DaemonError,
    DaemonNotReachable,
    DeadlineExceeded,
    EngineError,
    FreeTokenError,
    LoadCancelled,
)

SERVICE = "freetoken"
CALL_S = 30.0  # a control call answers at once; this is for a machine that swaps
CONNECT_S = 3.0
SILENCE_S = 45.0  # a stream sends something every 10 to 15 s
RECONNECTS = 3  # in a row, without one event between them

V = TypeVar("V")


class ControlClient:
    """One daemon, spoken to over one connection pool. A context manager."""

    def __init__(self, address: Address, *, api_key: str | None = None) -> None:
        self.address = address
        self._api_key = api_key
        self._http = httpx.Client(
            base_url=address.url,
            timeout=httpx.Timeout(CALL_S, connect=CONNECT_S),
            trust_env=False,
            headers={"user-agent": "ft"},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    # ── one question, one answer ────────────────────────────────────────────────────────────────────────────────────
    def live(self) -> Live:
        """Who answers at the address, asked without the token. DaemonNotReachable if it is not our daemon."""
        found = _decode(self._call("GET", "/api/v1/live", token=False), Live)
        other = found.instance_id not in (None, self.address.instance_id)
        if found.service != SERVICE or other:
            raise DaemonNotReachable(
                f"another program answers at {self.address.url} (it says {found.service!r})",
                fixes=("ft daemon start",),
            )
        return found

    def engine(self) -> dict[str, Any]:
        """GET /engine as it comes: state, model, plan, measured, stats, experts, memory, last failure."""
        return self._object("GET", "/api/v1/engine")

    def load(self, model: str, options: Mapping[str, object] | None = None) -> Operation | None:
        """Ask for a model. The running operation, or None if that model is already loaded with these options.

        `model` is an id, or the absolute path of a folder or .gguf file. LifecycleBusy while another load runs.
        """
        response = self._call("POST", "/api/v1/engine/load", {"model": model, "options": dict(options or {})})
        return _operation(response) if response.status_code == httpx.codes.ACCEPTED else None

    def unload(self) -> Operation | None:
        """Ask the engine to end. None if there is none."""
        response = self._call("POST", "/api/v1/engine/unload", {})
        return _operation(response) if response.status_code == httpx.codes.ACCEPTED else None

    def operation(self, operation_id: str, wait_s: float = 0.0) -> Operation:
        """The operation as it is now, or as soon as it is done, after `wait_s` seconds at the latest."""
        headers = {"prefer": f"wait={round(wait_s)}"} if wait_s else {}
        response = self._call("GET", f"/api/v1/operations/{operation_id}", headers=headers, within_s=CALL_S + wait_s)
        return _operation(response)

    def cancel(self, operation_id: str) -> None:
        """Ask a running operation to end."""
        self._call("POST", f"/api/v1/operations/{operation_id}/cancel", {})

    def shutdown(self) -> None:
        """Ask the daemon and its engine to end. Returns when it was heard; see wait_gone."""
        self._call("POST", "/api/v1/daemon/shutdown", {"engine": "stop"})

    # ── streams ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def events(self, after: str | None = None) -> Iterator[Event]:
        """The event stream; a lost connection is taken up again where it broke.

        Endless: the caller stops. Raises DaemonNotReachable when the daemon is gone, and when connections break again
        and again without a new event (the greeting of each is not one).
        """
        failures = 0
        while True:
            try:
                for record in self._event_records(after):
                    if record.id not in (None, after):
                        failures, after = 0, record.id
                    yield _decode_text(record.data, Event)
            except httpx.TransportError as error:
                failures += 1
                if failures > RECONNECTS or not self.address.running():
                    raise self._unreachable(error) from error
                time.sleep(0.2 * failures)

    def follow(self, operation_id: str) -> Iterator[Operation]:
        """The operation, each time that it changes, until it is done.

        Raises the operation's own error when it failed, LoadCancelled when somebody cancelled it.
        """
        latest = self.operation(operation_id)
        yield latest
        if not latest.done:
            for event in self.events():
                found = _mentioned(event, operation_id)
                if found is None and event.type == "stream.snapshot":  # long lists are cut
                    found = self.operation(operation_id)
                if found is not None and found != latest:
                    latest = found
                    yield latest
                if latest.done:
                    break
        raise_if_failed(latest)

    def chat(self, request: Mapping[str, object]) -> Generator[chat.Piece]:
        """Stream POST /v1/chat/completions: pieces of text, then one with the usage. Closing it cancels the answer.

        Raises the typed error the server sends, also in mid-stream; a stream that ends early is an EngineError.
        """
        body = {**request, "stream": True, "stream_options": {"include_usage": True}}
        headers = {"authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        try:
            with self._stream("POST", "/v1/chat/completions", headers=headers, json=body) as lines:
                yield from chat.pieces(record.data for record in sse.records(lines))
        except httpx.TransportError as error:
            raise EngineError(f"the answer was cut off: {error}", fixes=("ft status",)) from error

    # ── plumbing ────────────────────────────────────────────────────────────────────────────────────────────────────
    def _event_records(self, after: str | None) -> Iterator[sse.Record]:
        headers = self._authorised({"last-event-id": after} if after else {})
        with self._stream("GET", "/api/v1/events", headers=headers) as lines:
            yield from sse.records(lines)
        raise httpx.RemoteProtocolError("the event stream ended")

    @contextmanager
    def _stream(self, method: str, path: str, **options: Any) -> Iterator[Iterator[str]]:
        timeout = httpx.Timeout(SILENCE_S, connect=CONNECT_S)
        try:
            with self._http.stream(method, path, timeout=timeout, **options) as response:
                if response.is_error:
                    response.read()
                    raise error_of(response)
                yield response.iter_lines()
        except httpx.ReadTimeout as error:
            raise DeadlineExceeded(f"{path} sent nothing for {SILENCE_S:.0f} s", fixes=("ft status",)) from error
        except httpx.ConnectError as error:
            raise self._unreachable(error) from error

    def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        token: bool = True,
        within_s: float = CALL_S,
    ) -> httpx.Response:
        sent = self._authorised(headers or {}) if token else dict(headers or {})
        timeout = httpx.Timeout(within_s, connect=CONNECT_S)
        try:
            response = self._http.request(method, path, json=body, headers=sent, timeout=timeout)
        except httpx.TimeoutException as error:
            raise DeadlineExceeded(
                f"the daemon did not answer {method} {path} within {within_s:.0f} s", fixes=("ft daemon status",)
            ) from error
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        if response.is_error:
            raise error_of(response)
        return response

    def _object(self, method: str, path: str) -> dict[str, Any]:
        return _decode(self._call(method, path), dict[str, Any])

    def _authorised(self, headers: Mapping[str, str]) -> dict[str, str]:
        return {**headers, "authorization": f"Bearer {self.address.token}"}

    def _unreachable(self, error: Exception) -> DaemonNotReachable:
        return DaemonNotReachable(
            f"the daemon at {self.address.url} (pid {self.address.pid}) does not answer: {error}",
            fixes=("ft daemon status", "ft daemon start"),
        )


def raise_if_failed(operation: Operation) -> None:
    """Raise what a finished operation failed with; nothing when it succeeded."""
    if operation.state == "succeeded":
        return
    if operation.error is not None:
        raise operation.error.error()
    if operation.state in ("cancelled", "superseded"):
        raise LoadCancelled(f"the {operation.kind or 'operation'} was {operation.state}")
    raise DaemonError(f"operation {operation.id} ended as {operation.state}")


def error_of(response: httpx.Response) -> FreeTokenError:
    """The typed error in a refused response: problem+json on /api/v1, OpenAI's shape on /v1, else the status line."""
    try:
        body = json.loads(response.content)
    except ValueError:
        body = None
    if isinstance(body, dict) and isinstance(body.get("error"), dict):
        return chat.error_in(body["error"])
    if isinstance(body, dict) and isinstance(body.get("code"), str):
        return msgspec.convert(body, Problem).error()
    return DaemonError(f"{response.request.url.path} answered {response.status_code} {response.reason_phrase}")


def _mentioned(event: Event, operation_id: str) -> Operation | None:
    """What `event` says about the operation: an update of its own, or its row in a snapshot."""
    if event.type == "operation.updated":
        rows = [event.data]
    elif event.type == "stream.snapshot":
        rows = event.data.get("operations", [])
    else:
        return None
    return next((msgspec.convert(row, Operation) for row in rows if row.get("id") == operation_id), None)


def _operation(response: httpx.Response) -> Operation:
    return _decode(response, Operation)


def _decode(response: httpx.Response, kind: type[V]) -> V:
    return _decode_text(response.content, kind)


def _decode_text(text: bytes | str, kind: type[V]) -> V:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as error:
        raise DaemonError(
            f"the daemon answered something this ft does not understand: {error}",
            fixes=("ft daemon stop, then ft daemon start with this version",),
        ) from error
