"""A private, framed connection between two processes of one user: a Unix socket, or a named pipe on Windows.

The only place that knows which of the two it is. Does not know what the messages mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import sys
import tempfile
import warnings
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec
import platformdirs

from freetoken.core.errors import EngineDied
from freetoken.wire import codec
from freetoken.wire.messages import Message

In = TypeVar("In")
MAX_PATH_BYTES = 104  # of a Unix socket on macOS, its zero included; Linux allows 108
MAX_UNSENT_BYTES = 64 << 20  # a reader this far behind is treated as gone
_TEMPORARY = "freetoken-"
_RETRY_S = 0.02


class Channel(Generic[In]):
    """One open connection. `receive` belongs to one task; `send` may be called from any code of the event loop."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, decoder: msgspec.msgpack.Decoder[In]
    ) -> None:
        self._reader, self._writer, self._decoder = reader, writer, decoder

    async def receive(self) -> In | None:
        """The next message; None when the other side is gone. Raises EngineProtocolError (codec.read)."""
        return await codec.read(self._reader, self._decoder)

    def send(self, *messages: Message) -> None:
        """Queue `messages`; never waits. After the other side is gone this does nothing: `receive` says so."""
        self.send_frames(b"".join(map(codec.encode, messages)))

    def send_frames(self, frames: bytes) -> None:
        """`send` for frames that another thread has encoded."""
        if self._writer.is_closing():
            return
        self._writer.write(frames)
        if self._writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self._writer.transport.abort()

    async def close(self, timeout_s: float = 1.0) -> None:
        """Send what is queued, then close; what is left after `timeout_s` is dropped."""
        self._writer.close()
        try:
            async with asyncio.timeout(timeout_s):
                await self._writer.wait_closed()
        except (TimeoutError, OSError):
            self._writer.transport.abort()


class Listener(Protocol):
    def close(self) -> None: ...


Handler = Callable[[Channel[In]], Awaitable[None]]


async def serve(address: str, decoder: msgspec.msgpack.Decoder[In], handler: Handler[In]) -> Listener:
    """Listen at `address` for this user only; `handler` runs once a connection and owns it. Raises OSError."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await handler(Channel(reader, writer, decoder))

    if sys.platform == "win32":
        loop = asyncio.get_running_loop()
        assert isinstance(loop, asyncio.ProactorEventLoop)  # noqa: S101  the default there; no other loop has pipes

        def protocol() -> asyncio.StreamReaderProtocol:
            return asyncio.StreamReaderProtocol(asyncio.StreamReader(), connected)

        (pipe,) = await loop.start_serving_pipe(protocol, address)
        return pipe
    server = await asyncio.start_unix_server(connected, address)
    os.chmod(address, 0o600)
    return server


async def connect(address: str, decoder: msgspec.msgpack.Decoder[In], timeout_s: float) -> Channel[In]:
    """Connect, trying again until somebody listens. Raises EngineDied when nobody does within `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    return Channel(*await _open(address), decoder)
                except (FileNotFoundError, ConnectionError):
                    await asyncio.sleep(_RETRY_S)
    except TimeoutError:
        raise EngineDied(
            f"No engine process listened on its socket within {timeout_s:g} s.", numbers={"timeout_s": timeout_s}
        ) from None


async def _open(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if sys.platform == "win32":
        loop = asyncio.get_running_loop()
        assert isinstance(loop, asyncio.ProactorEventLoop)  # noqa: S101  the default there; no other loop has pipes
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.create_pipe_connection(lambda: protocol, address)
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)
    return await asyncio.open_unix_connection(address)


def private_address(name: str) -> str:
    """An address that only this user can reach, unused so far: the user's runtime folder, else a 0700 temporary one.

    `remove` it when its server is gone: a killed server cannot.
    """
    if sys.platform == "win32":
        return rf"\\.\pipe\freetoken-{name}"
    with warnings.catch_warnings():  # it warns where there is none; the temporary folder is the answer to that
        warnings.simplefilter("ignore")
        folder = platformdirs.user_runtime_path("freetoken")  # $XDG_RUNTIME_DIR/freetoken
    path = folder / f"{name}.sock"
    if not _is_private(folder.parent) or len(os.fsencode(path)) >= MAX_PATH_BYTES:
        return str(Path(tempfile.mkdtemp(prefix=_TEMPORARY)) / "engine.sock")
    folder.mkdir(mode=0o700, exist_ok=True)
    return str(path)


def remove(address: str) -> None:
    """Remove what a server that is gone has left at `address`; nothing if it left nothing."""
    if sys.platform == "win32":
        return
    path = Path(address)
    path.unlink(missing_ok=True)
    if path.parent.name.startswith(_TEMPORARY):
        with contextlib.suppress(OSError):  # not empty, or gone
            path.parent.rmdir()


def _is_private(folder: Path) -> bool:
    if sys.platform == "win32":
        return True
    try:
        facts = folder.stat()
    except OSError:
        return False
    return facts.st_uid == os.getuid() and stat.S_IMODE(facts.st_mode) & 0o077 == 0
