"""From what was asked for to exactly what is fetched: repository, commit, files with size and digest.

Asks the hub; changes nothing. Everything that can be refused is refused here, before a byte is downloaded.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from urllib.parse import unquote

import httpx

from freetoken.core.errors import DigestNeeded, HubUnavailable, UsageError
from freetoken.daemon.downloads.choose import Choice, RepoFile, choose, has_folder_model, has_index, variants
from freetoken.daemon.downloads.hub import HuggingFace, RepoInfo, explain, unreachable
from freetoken.daemon.downloads.job import FileRecord, Record
from freetoken.daemon.downloads.names import (
    ModelName,
    checked_file,
    checked_repo,
    checked_revision,
    checked_sha256,
)
from freetoken.daemon.downloads.web import ENDPOINT, Answer, Origin, Web
from freetoken.daemon.state import utc

_PAGE = re.compile(r"/([^/]+/[^/]+)/(?:resolve|blob)/([^/]+)/(.+)")  # a file's page or address on a hub
_HUB = Origin.parse(ENDPOINT)


@dataclass(frozen=True, slots=True)
class Order:
    """A model by its id, or the address of a .gguf file; `sha256` for an address whose server does not say it."""

    model: str | None = None
    revision: str = "main"
    url: str | None = None
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Offer:
    """One thing that a repository lets be downloaded."""

    model: str
    choice: Choice


class Desk:
    """Takes orders."""

    def __init__(self, web: Web, api: HuggingFace) -> None:
        self._web, self._api = web, api

    async def record(self, order: Order) -> Record:
        """The download that `order` means. Raises what choose, the hub and the name rules raise."""
        if (order.model is None) == (order.url is None):
            raise UsageError("Give either a model or the address of a .gguf file.", param="model")
        if order.url is not None:
            return await self._at(_plain(order.url), order.sha256)
        name, revision = ModelName.parse(order.model or ""), checked_revision(order.revision)
        return await self._of_repo(await self._api.info(name.repo, revision), name.variant)

    async def offers(self, repo: str, revision: str) -> tuple[RepoInfo, list[Offer]]:
        """All that can be had of a repository: the Hugging Face model, or each GGUF variant."""
        info = await self._api.info(checked_repo(repo), checked_revision(revision))
        labels: list[str | None] = [*variants(info.files)]
        if has_folder_model(info.files) or not labels:
            labels.insert(0, None)
        choices = [await self._choice(info, label) for label in labels]
        return info, [Offer(str(ModelName(info.repo, choice.variant)), choice) for choice in choices]

    async def _choice(self, info: RepoInfo, variant: str | None) -> Choice:
        indexed = variant is None and has_folder_model(info.files) and has_index(info.files)
        return choose(info.files, variant, await self._api.shards(info) if indexed else None)

    async def _of_repo(self, info: RepoInfo, variant: str | None) -> Record:
        choice, now = await self._choice(info, variant), utc(time.time())
        return Record(
            model=str(ModelName(info.repo, choice.variant)),
            repo=info.repo,
            url=None,
            commit=info.commit,
            license=info.license,
            files=tuple(_file_record(chosen.file, chosen.local) for chosen in choice.files),
            created=now,
            updated=now,
        )

    async def _at(self, url: httpx.URL, sha256: str | None) -> Record:
        page = _PAGE.fullmatch(unquote(url.path))
        if page and Origin.of(url) in (_HUB, self._web.allowed.endpoint):
            info = await self._api.info(checked_repo(page[1]), checked_revision(page[2]))
            held = (label for label, files in variants(info.files).items() if page[3] in {f.name for f in files})
            label = next(held, None)
            if label is None:
                raise UsageError(f"{page[1]} has no GGUF model {page[3][:120]!r}.", param="url")
            return await self._of_repo(info, label)
        name = checked_file(unquote(url.path).rpartition("/")[2])
        if not name.lower().endswith(".gguf"):
            raise UsageError(f"{name!r} is no .gguf file, the only kind that is taken by its address.", param="url")
        file, now = await self._head(url, name, sha256), utc(time.time())
        return Record(
            model=f"local/{name[: -len('.gguf')]}",
            repo=None,
            url=str(url),
            commit=(file.sha256 or "")[:40],
            license=None,
            files=(_file_record(file, name),),
            created=now,
            updated=now,
        )

    async def _head(self, url: httpx.URL, name: str, sha256: str | None) -> RepoFile:
        """What the server says of a plain file. Raises DigestNeeded where neither it nor the caller knows a digest."""
        try:
            async with self._web.open(url, method="HEAD") as answer:
                if answer.response.status_code != 200:
                    raise explain(answer.response, url.host, None, has_token=self._web.has_token)
                linked, size = _digest(answer), answer.response.headers.get("content-length", "")
        except httpx.TransportError as error:
            raise unreachable(error, url.host) from error
        if not size.isdecimal():
            raise HubUnavailable(f"{url.host} does not say how long {name} is.")
        digest = sha256 or linked
        if digest is None:
            raise DigestNeeded(
                f"{url.host} gives no SHA-256 of {name}, so that nobody could tell a damaged file.",
                fixes=("give the sha256 that the model's page shows", "take the model from huggingface.co"),
                param="sha256",
            )
        return RepoFile(name, int(size), sha256=checked_sha256(digest))


def _plain(text: str) -> httpx.URL:
    """An address without anything secret in it: it is written into job.json and shown."""
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise UsageError("That is no valid address.", param="url") from error
    if url.userinfo or url.query not in (b"", b"download=true"):
        raise UsageError(
            "An address with a password or a query is not taken: it holds a secret, or works for a moment only.",
            fixes=("give the plain address of the file",),
            param="url",
        )
    return url.copy_with(query=None, fragment=None)


def _digest(answer: Answer) -> str | None:
    linked = answer.first.get("x-linked-etag", "").strip('"')
    return linked if re.fullmatch(r"[0-9a-f]{64}", linked) else None


def _file_record(file: RepoFile, local: str) -> FileRecord:
    return FileRecord(file.name, local, file.size, file.sha256, file.blob_id)
