"""HTTP with the two rules of downloads: only hosts of the list, at every hop; the token only to its own host.

Allowed are huggingface.co, its subdomains, those of hf.co, the endpoint and the configured mirrors: https, unless a
mirror on this very machine was configured as http://. Redirects are followed here, one by one. Does not know what the
answers mean.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType

import httpx

from freetoken.core.errors import DownloadHostRefused, HubUnavailable, SettingError
from freetoken.daemon.downloads.patience import Patience

ENDPOINT = "https://huggingface.co"
CONNECTIONS = 32
_HOPS = 6
_PORTS = {"http": 80, "https": 443}
_LOOPBACK = ("127.0.0.1", "localhost", "::1")

Token = Callable[[], str | None]

logging.getLogger("httpx").setLevel(logging.WARNING)  # at INFO it logs every address; those of a CDN are signed


@dataclass(frozen=True, slots=True)
class Origin:
    scheme: str
    host: str
    port: int

    @classmethod
    def of(cls, url: httpx.URL) -> Origin:
        return cls(url.scheme, url.host, url.port or _PORTS.get(url.scheme, 0))

    @classmethod
    def parse(cls, text: str) -> Origin:
        """`host`, `host:port` or an origin; http:// for loopback only. Raises SettingError."""
        try:
            url = httpx.URL(text if "://" in text else f"https://{text}")
        except httpx.InvalidURL:
            url = httpx.URL()
        if not url.host or url.userinfo or url.scheme not in _PORTS:
            raise SettingError(f"{text!r} is no address of a mirror: write https://host.")
        if url.scheme == "http" and not _is_loopback(url.host):
            raise SettingError(
                f"{text!r} is not encrypted: anybody on the way could change a model.",
                fixes=(f"https://{url.host}",),
            )
        return cls.of(url)


class AllowedHosts:
    """The list. `endpoint` and `mirrors` are what the user configured."""

    def __init__(self, endpoint: str = ENDPOINT, mirrors: Iterable[str] = ()) -> None:
        self.endpoint = Origin.parse(endpoint)
        self._origins = {self.endpoint, *map(Origin.parse, mirrors)}

    def check(self, url: httpx.URL) -> None:
        """Raises DownloadHostRefused. The path and query of an address are never quoted: they may hold a signature."""
        if Origin.of(url) in self._origins and not url.userinfo:
            return
        hub = url.host in ("huggingface.co", "hf.co") or url.host.endswith((".huggingface.co", ".hf.co"))
        if hub and url.scheme == "https" and url.port is None and not url.userinfo:
            return
        raise DownloadHostRefused(
            f"{url.scheme}://{url.host[:100]} is not on the list of hosts that models are downloaded from.",
            fixes=("take the model from huggingface.co", "add the host to the setting hub_mirrors if you trust it"),
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """The last hop's response, its body not yet read, and the headers of the first hop."""

    response: httpx.Response
    first: httpx.Headers
    hops: int  # 0: not redirected


class Web:
    """A client for one endpoint. `token` is asked before every request to it and kept nowhere."""

    def __init__(self, allowed: AllowedHosts, token: Token, patience: Patience) -> None:
        self.allowed = allowed
        self._token, self._patience = token, patience
        self._made: httpx.AsyncClient | None = None

    async def __aenter__(self) -> Web:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        if self._made is not None:
            await self._made.aclose()

    @property
    def _client(self) -> httpx.AsyncClient:
        """Made when it is first needed: a daemon that downloads nothing does without its certificates."""
        if self._made is None:
            silence_s, connect_s = self._patience.stall_s, self._patience.connect_s
            self._made = httpx.AsyncClient(
                headers={"user-agent": "freetoken"},
                timeout=httpx.Timeout(silence_s, connect=connect_s, pool=4 * silence_s),
                limits=httpx.Limits(max_connections=CONNECTIONS),
                follow_redirects=False,
                mounts={f"all://{'[::1]' if ':' in host else host}": None for host in _LOOPBACK},  # never by a proxy
            )
        return self._made

    @property
    def has_token(self) -> bool:
        return bool(self._token())

    @asynccontextmanager
    async def open(
        self, url: str | httpx.URL, headers: Mapping[str, str] | None = None, method: str = "GET"
    ) -> AsyncGenerator[Answer]:
        """The answer to `url`, whatever its status, after redirects.

        Raises DownloadHostRefused, HubUnavailable for a redirect that leads nowhere, httpx.TransportError.
        """
        hop, first = _parsed(url), None
        for hops in range(_HOPS):
            self.allowed.check(hop)
            request = self._client.build_request(method, hop, headers={**(headers or {}), **self._standing(hop)})
            response = await self._client.send(request, stream=True)
            first = first or response.headers
            try:
                if not response.has_redirect_location:
                    yield Answer(response, first, hops)
                    return
                hop = hop.join(_parsed(response.headers["location"]))
            finally:
                await response.aclose()
        raise HubUnavailable(f"{hop.host} redirects more than {_HOPS - 1} times.")

    def _standing(self, url: httpx.URL) -> dict[str, str]:
        """Bytes as they are on the server, and the token where it belongs."""
        token = self._token() if Origin.of(url) == self.allowed.endpoint else None
        return {"accept-encoding": "identity", **({"authorization": f"Bearer {token}"} if token else {})}


def _parsed(url: str | httpx.URL) -> httpx.URL:
    try:
        return httpx.URL(url)
    except httpx.InvalidURL as error:
        raise DownloadHostRefused("an address is not valid, and nothing is downloaded from it.") from error


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
