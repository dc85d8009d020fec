"""Frames: a 4-byte big-endian length, then msgpack of one tagged message; at most 16 MiB.

Knows bytes and messages. Does not know sockets (channel.py) nor what a message means. Whatever arrives is checked
against its declared type before anybody sees it; anything else is an EngineProtocolError, never another exception.
"""

from __future__ import annotations

import asyncio
import hmac
import struct
from typing import TypeVar

import msgspec

from freetoken.core.errors import EngineProtocolError
from freetoken.wire.messages import PROTO, Down, Hello, Message, Up

M = TypeVar("M")
MAX_FRAME_BYTES = 16 << 20
_LENGTH = struct.Struct(">I")


def _plain(value: object) -> int | float:
    """core.units' Bytes and Seconds, which msgspec does not take for the numbers they are."""
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    raise TypeError(f"{type(value).__name__} cannot be sent")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
UP: msgspec.msgpack.Decoder[Up] = msgspec.msgpack.Decoder(Up)  # what a daemon reads
DOWN: msgspec.msgpack.Decoder[Down] = msgspec.msgpack.Decoder(Down)  # what an engine reads


def encode(message: Message) -> bytes:
    """The frame of `message`. Raises EngineProtocolError when it would be larger than the limit."""
    payload = _ENCODER.encode(message)
    _check_size(len(payload))
    return _LENGTH.pack(len(payload)) + payload


def decode(payload: bytes, decoder: msgspec.msgpack.Decoder[M]) -> M:
    """The message in `payload` (without its length). Raises EngineProtocolError for anything malformed."""
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # ValidationError is a DecodeError
        raise EngineProtocolError(f"A message of {len(payload)} bytes cannot be read: {error}.") from error


async def read(reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[M]) -> M | None:
    """The next message; None when the other side has closed between two frames, or was killed.

    Raises EngineProtocolError for a frame that is too large, malformed or cut off.
    """
    try:
        (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        _check_size(size)
        return decode(await reader.readexactly(size), decoder)
    except asyncio.IncompleteReadError as end:
        if end.partial or end.expected != _LENGTH.size:
            raise EngineProtocolError(
                f"The connection ended inside a message ({len(end.partial)} bytes of it)."
            ) from end
        return None
    except ConnectionError:
        return None


def check_hello(message: Message | None, nonce: str) -> Hello:
    """`message` as the first frame it must be. Raises EngineProtocolError: no hello, another PROTO, another nonce."""
    if not isinstance(message, Hello):
        raise EngineProtocolError("The connection did not begin with a hello.")
    if message.proto != PROTO:
        raise EngineProtocolError(
            f"The other side speaks protocol {message.proto} (version {message.build}), this one {PROTO}: "
            "stop both and start them from the same installation.",
            numbers={"theirs": message.proto, "ours": PROTO},
        )
    if not hmac.compare_digest(message.nonce.encode(), nonce.encode()):
        raise EngineProtocolError("The hello carries another secret than the runtime file.")
    return message


def _check_size(size: int) -> None:
    if size > MAX_FRAME_BYTES:
        raise EngineProtocolError(
            f"A message of {size} bytes is larger than the limit of {MAX_FRAME_BYTES}.",
            numbers={"bytes": size, "limit": MAX_FRAME_BYTES},
        )
