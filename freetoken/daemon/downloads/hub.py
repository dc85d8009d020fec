"""The Hugging Face API, as far as downloads need it: what a repository holds, where its files are, search.

Facts: the hub's own OpenAPI document, and the answers of the `resolve` addresses (X-Error-Code, X-Linked-Etag). Answers
are bounded and converted strictly; what is refused is explained with what to do. Does not know which files are wanted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from freetoken.catalog.safetensors import INDEX
from freetoken.core.errors import (
    DownloadFailed,
    FileChanged,
    FileCorrupt,
    FreeTokenError,
    HubTokenRefused,
    HubUnavailable,
    RepoGated,
    RepoNotFound,
    RevisionNotFound,
)
from freetoken.daemon.downloads.choose import RepoFile
from freetoken.daemon.downloads.names import checked_commit, checked_repo, checked_sha256, refuse_hostile
from freetoken.daemon.downloads.patience import Patience, retry_after_s
from freetoken.daemon.downloads.web import ENDPOINT, Web

T = TypeVar("T")

_ANSWER_LIMIT = 64 << 20  # bytes; 100 000 files are about 30 MB
_DEADLINE_S = 60.0  # of one question, all tries together
_CALL = Patience(attempts=3, first_s=0.5, longest_s=4.0, longest_retry_after_s=5.0)
_TRANSIENT = frozenset({408, 429, 500, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class RepoInfo:
    """A repository at one commit."""

    repo: str
    commit: str
    files: tuple[RepoFile, ...]
    gated: bool
    license: str | None


@dataclass(frozen=True, slots=True)
class Found:
    """A row of a search; unknown is None."""

    repo: str
    gated: bool
    license: str | None
    downloads: int | None
    likes: int | None
    updated: str | None


class _Lfs(msgspec.Struct):
    sha256: str
    size: Annotated[int, msgspec.Meta(ge=0)]


class _Sibling(msgspec.Struct):
    rfilename: str
    size: Annotated[int, msgspec.Meta(ge=0)] | None = None
    blob_id: str | None = msgspec.field(default=None, name="blobId")
    lfs: _Lfs | None = None


class _Repo(msgspec.Struct):
    id: str
    sha: str | None = None
    siblings: list[_Sibling] = []
    gated: bool | str = False
    tags: list[str] = []
    downloads: int | None = None
    likes: int | None = None
    last_modified: str | None = msgspec.field(default=None, name="lastModified")

    @property
    def license(self) -> str | None:
        return next((tag.removeprefix("license:") for tag in self.tags if tag.startswith("license:")), None)


class HuggingFace:
    """Questions to the hub at `endpoint`, which is HF_ENDPOINT or the hub itself."""

    def __init__(self, web: Web, endpoint: str = ENDPOINT) -> None:
        self._web = web
        self._endpoint = endpoint.rstrip("/")

    async def info(self, repo: str, revision: str) -> RepoInfo:
        """What `repo` holds; the commit is what everything is downloaded at from then on."""
        url = f"{self._endpoint}/api/models/{repo}/revision/{quote(revision, safe='')}?blobs=true"
        found = _decoded(await self._ask(url, repo, revision), _Repo)
        return RepoInfo(
            repo=checked_repo(found.id),
            commit=checked_commit(found.sha),
            files=tuple(_file(sibling) for sibling in found.siblings),
            gated=bool(found.gated),
            license=found.license,
        )

    async def shards(self, info: RepoInfo) -> frozenset[str]:
        """The weight files that the repository's index names. Raises FileCorrupt."""
        index = _decoded(await self._ask(self.url(info.repo, info.commit, INDEX), info.repo, info.commit), _Index)
        return frozenset(index.weight_map.values())

    async def search(self, words: str, limit: int) -> list[Found]:
        """Models whose name matches, the most downloaded first. Rows with names that are none are left out."""
        query = httpx.QueryParams({"search": words, "limit": limit, "sort": "downloads", "direction": -1, "full": True})
        rows = _decoded(await self._ask(f"{self._endpoint}/api/models?{query}", None, None), list[_Repo])
        return [
            Found(row.id, bool(row.gated), row.license, row.downloads, row.likes, row.last_modified)
            for row in rows
            if _is_repo(row.id)
        ]

    def url(self, repo: str, commit: str, name: str) -> str:
        """Where a file of a repository is."""
        return f"{self._endpoint}/{repo}/resolve/{commit}/{quote(name)}"

    async def _ask(self, url: str, repo: str | None, revision: str | None) -> bytes:
        """The body of the answer to a GET; a server that fails is asked again, for a minute at most."""
        failures, host = 0, httpx.URL(url).host
        async with _deadline(host):
            while True:
                try:
                    return await self._ask_once(url, repo, revision)
                except httpx.TransportError as error:
                    problem: FreeTokenError = unreachable(error, host)
                except HubUnavailable as error:
                    problem = error
                failures += 1
                wait_s = _CALL.wait_s(failures, problem.retry_after_s)
                if wait_s is None:
                    raise problem
                await asyncio.sleep(wait_s)

    async def _ask_once(self, url: str, repo: str | None, revision: str | None) -> bytes:
        async with self._web.open(url, {"accept": "application/json"}) as answer:
            response = answer.response
            if response.status_code != 200:
                raise explain(response, repo, revision, has_token=self._web.has_token)
            body = bytearray()
            async for chunk in response.aiter_raw():
                body += chunk
                if len(body) > _ANSWER_LIMIT:
                    raise DownloadFailed(f"{response.url.host} answers with more than {_ANSWER_LIMIT} bytes.")
            return bytes(body)


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def explain(response: httpx.Response, repo: str | None, revision: str | None, *, has_token: bool) -> FreeTokenError:
    """What a refusal by the hub means and what to do. The hub's codes are in X-Error-Code."""
    status, code, host = response.status_code, response.headers.get("x-error-code", ""), response.url.host
    page = f"{response.url.scheme}://{response.url.netloc.decode()}/{repo}"
    wait_s = retry_after_s(response.headers.get("retry-after"), time.time())
    if status in _TRANSIENT:
        what = "asks to come back later" if status == 429 else "has a fault of its own"
        return HubUnavailable(f"{host} {what} (HTTP {status}).", retry_after_s=wait_s)
    if code == "GatedRepo":
        step = f"Open {page}, accept its terms with your account, then try again"
        give = "Give FreeToken a token of that account: HF_TOKEN, or the hub token of the settings"
        return RepoGated(f"{repo} is gated: its owner shares it after an agreement.", fixes=(step, give))
    if code == "RevisionNotFound":
        return RevisionNotFound(f"{repo} has no revision {revision!r}.", fixes=("take the revision main",))
    if code == "EntryNotFound":
        return FileChanged(f"{repo} no longer has this file at {revision!r}.", fixes=("start the download anew",))
    if status == 401 and has_token and code != "RepoNotFound":
        return HubTokenRefused(f"{host} does not accept the token (HTTP 401).", fixes=("make a new token there",))
    if status in (401, 404) or code == "RepoNotFound":
        why = "or your token may not see it" if has_token else "or is private and needs a token"
        return RepoNotFound(f"{host} has no {repo}, {why}.", fixes=("check the spelling: org/name", "ft search WORDS"))
    if status == 403:
        return RepoGated(f"{host} does not give access to {repo} (HTTP 403).", fixes=(f"Look at {page}",))
    return DownloadFailed(f"{host} answers with HTTP {status}.")


def unreachable(error: httpx.TransportError, host: str) -> HubUnavailable:
    """By the kind of failure only: its text may hold an address with a signature."""
    kinds = ((httpx.TimeoutException, "does not answer in time"), (httpx.ConnectError, "cannot be reached"))
    what = next((words for kind, words in kinds if isinstance(error, kind)), "cut the connection")
    return HubUnavailable(
        f"{host} {what} ({type(error).__name__}).",
        fixes=("check the network and the proxy", "set HF_ENDPOINT to a mirror if the hub is blocked here"),
    )


@asynccontextmanager
async def _deadline(host: str) -> AsyncGenerator[None]:
    try:
        async with asyncio.timeout(_DEADLINE_S):
            yield
    except TimeoutError as error:
        raise HubUnavailable(f"{host} has not answered in {_DEADLINE_S:.0f} s.", retry_after_s=60.0) from error


def _file(sibling: _Sibling) -> RepoFile:
    """Raises UnsafeName for a name or a digest that no hub gives, HubUnavailable for a file without size and digest."""
    name = refuse_hostile(sibling.rfilename)
    if sibling.lfs is not None:
        return RepoFile(name, sibling.lfs.size, sha256=checked_sha256(sibling.lfs.sha256))
    if sibling.size is None or sibling.blob_id is None:
        raise HubUnavailable(
            f"the hub lists {name[:100]!r} without size and digest; a mirror may not pass ?blobs=true."
        )
    return RepoFile(name, sibling.size, blob_id=checked_commit(sibling.blob_id))


def _is_repo(name: str) -> bool:
    try:
        checked_repo(name)
    except FreeTokenError:
        return False
    return True


def _decoded(raw: bytes, type: type[T]) -> T:
    try:
        return msgspec.json.decode(raw, type=type)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FileCorrupt(f"the hub's answer is not what its API promises: {error}") from error
