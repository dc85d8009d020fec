"""A model hub on two loopback ports, the API and its "CDN": real HTTP, ranges, redirects, ETag, digests, and faults.

Held to be right by huggingface_hub itself (tests/downloads/test_fake_hub.py). LFS files are redirected to the CDN with
X-Linked-Etag, small ones come from the API's port; refusals carry X-Error-Code, as the hub's do.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

CHUNK = 64 << 10
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


class Content:
    """Bytes that need no memory: `block` over and over, `size` of them."""

    def __init__(self, block: bytes, size: int | None = None, lfs: bool = False) -> None:
        self.block, self.size, self.lfs = block, len(block) if size is None else size, lfs
        sha256, git = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)
        for chunk in self.read(0, self.size):
            sha256.update(chunk)
            git.update(chunk)
        self.sha256, self.blob_id = sha256.hexdigest(), git.hexdigest()

    def read(self, begin: int, end: int) -> Iterator[bytes]:
        while begin < end:
            offset = begin % len(self.block)
            chunk = self.block[offset : offset + min(CHUNK, end - begin)]
            yield chunk
            begin += len(chunk)


@dataclass
class Repo:
    files: dict[str, Content]
    commit: str = "c" * 40
    gated: bool = False
    private: bool = False
    license: str = "apache-2.0"


@dataclass
class Faults:
    """What goes wrong with file contents, switched by a test at any time. `only` limits them to one file."""

    only: str | None = None
    cuts: int = 0  # that many answers end after `cut_after` bytes, with the connection
    cut_after: int = 0
    statuses: list[tuple[int, dict[str, str]]] = field(default_factory=list)  # answered first, one each
    ignore_range: bool = False  # 200 and the whole to every Range
    wrong_bytes: int = 0  # that many answers have their first byte flipped
    length: int | None = None  # what is sent and said instead of the right length
    not_satisfiable: int = 0  # that many Range requests are answered with 416
    stalls: int = 0  # that many answers stop after `cut_after` bytes and keep the connection
    bytes_per_s: float = 0.0  # 0: as fast as it goes
    redirect: str | None = None  # where the hub sends to instead of the CDN
    listing: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] = lambda files: files


@dataclass(frozen=True)
class Seen:
    server: str  # "hub" or "cdn"
    method: str
    path: str
    headers: dict[str, str]
    status: int


class FakeHub:
    """Serves `repos` while entered. `token`, where set, opens gated and private repositories."""

    def __init__(self, repos: dict[str, Repo] | None = None, token: str | None = None) -> None:
        self.repos, self.token = repos or {}, token
        self.faults, self.seen = Faults(), list[Seen]()
        self.lock = threading.Lock()
        self.stopping = threading.Event()
        self._servers = [_Server(self, name) for name in ("hub", "cdn")]

    def __enter__(self) -> FakeHub:
        for server in self._servers:
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stopping.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._servers[0].server_port}"

    @property
    def cdn(self) -> str:
        return f"http://127.0.0.1:{self._servers[1].server_port}"

    def requests(self, server: str | None = None, method: str = "GET") -> list[Seen]:
        with self.lock:
            return [seen for seen in self.seen if server in (None, seen.server) and seen.method == method]

    def take(self, name: str) -> bool:
        """Whether the fault of that name strikes now; one less is left."""
        with self.lock:
            left: int = getattr(self.faults, name)
            setattr(self.faults, name, max(0, left - 1))
            return left > 0


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, hub: FakeHub, name: str) -> None:
        self.hub, self.name = hub, name
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away are what these tests are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._route()

    def do_GET(self) -> None:
        self._route()

    # ── what is where ──
    def _route(self) -> None:
        address = urlsplit(self.path)
        path = unquote(address.path)
        if self.server.name == "cdn":
            repo, _, name = path[1:].partition("/-/")
            self._content(repo, name)
        elif path == "/api/models":
            self._search(parse_qs(address.query))
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/(.+))?", path):
            self._api(*match.groups())
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(*match.groups())
        else:
            self._refuse(404, "", "no such page")

    def _api(self, repo: str, kind: str | None, revision: str | None) -> None:
        found = self._found(repo, revision or "main", gate=False)
        if found is None:
            return
        if kind == "tree":
            self._json([_tree_row(name, content) for name, content in found.files.items()])
        else:
            self._json(self._info(repo, found))

    def _info(self, repo: str, found: Repo) -> dict[str, Any]:
        rows = [_sibling(name, content) for name, content in found.files.items()]
        return {
            "id": repo,
            "sha": found.commit,
            "private": found.private,
            "gated": "manual" if found.gated else False,
            "tags": ["safetensors", f"license:{found.license}"],
            "downloads": 7,
            "likes": 3,
            "lastModified": "2026-01-02T03:04:05.000Z",
            "siblings": self.server.hub.faults.listing(rows),
        }

    def _search(self, query: dict[str, list[str]]) -> None:
        words = query.get("search", [""])[0].lower()
        hub = self.server.hub
        self._json([self._info(name, repo) for name, repo in hub.repos.items() if words in name.lower()])

    def _resolve(self, repo: str, revision: str, name: str) -> None:
        found = self._found(repo, revision, gate=True)
        if found is None:
            return
        content = found.files.get(name)
        if content is None:
            self._refuse(404, "EntryNotFound", "Entry not found")
        elif not content.lfs:
            self._content(repo, name)
        else:
            hub = self.server.hub
            target = hub.faults.redirect or f"{hub.cdn}/{repo}/-/{quote(name)}?Signature=once"
            headers = {"location": target, "x-repo-commit": found.commit, "x-linked-size": str(content.size)}
            self._reply(302, {**headers, "x-linked-etag": f'"{content.sha256}"'})

    def _found(self, repo: str, revision: str, *, gate: bool) -> Repo | None:
        """The repository, or None where it was refused. Of a gated one the listing is public, the files are not."""
        found = self.server.hub.repos.get(repo)
        trusted = self.server.hub.token and self.headers.get("authorization") == f"Bearer {self.server.hub.token}"
        if found is None or (found.private and not trusted):
            self._refuse(404 if trusted else 401, "RepoNotFound", "Repository not found")
        elif gate and found.gated and not trusted:
            status = 403 if self.headers.get("authorization") else 401
            self._refuse(status, "GatedRepo", f"Access to model {repo} is restricted.")
        elif revision not in ("main", found.commit):
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return found
        return None

    # ── contents, and what goes wrong with them ──
    def _content(self, repo: str, name: str) -> None:
        hub, content = self.server.hub, self.server.hub.repos[repo].files[name]
        faults = hub.faults if hub.faults.only in (None, name) and self.command == "GET" else Faults()
        with hub.lock:
            refusal = faults.statuses.pop(0) if faults.statuses else None
        if refusal is not None:
            self._reply(refusal[0], refusal[1])
            return
        begin, end, status = 0, content.size, 200
        match = _RANGE.fullmatch(self.headers.get("range", ""))
        valid = self.headers.get("if-range") in (None, self._etag(content))
        if match and valid and not faults.ignore_range:
            begin, end, status = int(match[1]), min(int(match[2] or content.size - 1) + 1, content.size), 206
            if begin >= content.size or (faults.not_satisfiable and hub.take("not_satisfiable")):
                self._reply(416, {"content-range": f"bytes */{content.size}"})
                return
        end = end if faults.length is None else begin + min(faults.length, end - begin)
        headers = {"etag": self._etag(content), "accept-ranges": "bytes", "x-repo-commit": hub.repos[repo].commit}
        if status == 206:
            headers["content-range"] = f"bytes {begin}-{end - 1}/{content.size}"
        self._head(status, {**headers, "content-length": str(end - begin)})
        if self.command == "GET":
            self._send(content, begin, end, faults)

    def _send(self, content: Content, begin: int, end: int, faults: Faults) -> None:
        hub = self.server.hub
        cut, stall = faults.cuts and hub.take("cuts"), faults.stalls and hub.take("stalls")
        flip = bool(faults.wrong_bytes) and hub.take("wrong_bytes")
        stop = min(end, begin + faults.cut_after) if cut or stall else end
        for chunk in content.read(begin, stop):
            sent = bytes([chunk[0] ^ 1]) + chunk[1:] if flip else chunk
            flip = False
            self.wfile.write(sent)
            if faults.bytes_per_s:
                time.sleep(len(sent) / faults.bytes_per_s)
        if stall:
            hub.stopping.wait(30)
        if cut or stall:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

    def _etag(self, content: Content) -> str:
        return f'"{content.sha256 if content.lfs else content.blob_id}"'

    # ── answers ──
    def _json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self._reply(200, {"content-type": "application/json"}, body)

    def _refuse(self, status: int, code: str, message: str) -> None:
        codes = {"x-error-code": code, "x-error-message": message} if code else {}
        self._reply(status, codes, json.dumps({"error": message}).encode())

    def _reply(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self._head(status, {**headers, "content-length": str(len(body))})
        if self.command == "GET":
            self.wfile.write(body)

    def _head(self, status: int, headers: dict[str, str]) -> None:
        seen = {name.lower(): value for name, value in self.headers.items()}
        with self.server.hub.lock:
            self.server.hub.seen.append(Seen(self.server.name, self.command, self.path, seen, status))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


def _sibling(name: str, content: Content) -> dict[str, Any]:
    lfs = {"sha256": content.sha256, "size": content.size, "pointerSize": 134}
    row = {"rfilename": name, "size": content.size, "blobId": content.blob_id}
    return {**row, "blobId": "f" * 40, "lfs": lfs} if content.lfs else row


def _tree_row(name: str, content: Content) -> dict[str, Any]:
    row = {"type": "file", "oid": content.blob_id, "size": content.size, "path": name}
    lfs = {"oid": content.sha256, "size": content.size, "pointerSize": 134}
    return {**row, "lfs": lfs} if content.lfs else row
