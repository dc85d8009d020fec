"""A real server on a real socket around a fake host, and the real OpenAI client."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import fastapi
import httpx
import openai
import pytest
import uvicorn

from freetoken.api.pipeline import Limits
from freetoken.api.routes import v1_router
from tests.fakes.backend import FakeBackend, says
from tests.fakes.host import FakeHost

LIMITS = Limits(patience_s=0.15, comment_s=0.1, stalled_client_s=0.5)


class Service:
    """A running server. `backend.script` and `host` may be changed by a test at any time."""

    def __init__(self) -> None:
        self.backend = FakeBackend(lambda request: says("Hello there."))
        self.host = FakeHost(self.backend)
        app = fastapi.FastAPI()
        app.include_router(v1_router(self.host, LIMITS))
        # the protocol must be named: asyncio turns Nagle's delay off only for sockets that say they are TCP
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)  # so that a client can stop reading soon
        self._socket.bind(("127.0.0.1", 0))
        self._socket.listen()
        self.port = self._socket.getsockname()[1]
        self.http = httpx.Client(timeout=10)
        self.url = f"http://127.0.0.1:{self.port}"
        config = uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=2)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)
        self._socket.close()
        self.http.close()
        assert not self._thread.is_alive()


@pytest.fixture(scope="module")
def running() -> Iterator[Service]:
    service = Service()
    service.start()
    yield service
    service.stop()


@pytest.fixture
def service(running: Service) -> Service:
    """The module's server with a fresh host and counters."""
    running.backend.__init__(lambda request: says("Hello there."))  # type: ignore[misc]
    running.host.__init__(running.backend)  # type: ignore[misc]
    return running


@pytest.fixture(scope="module")
def client(running: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=10) as client:
        yield client
