"""The ways in which a WebSocket client proves that it has the token, and the subprotocol that it then speaks.

A browser can set no header on a WebSocket. It offers two subprotocols, `freetoken.v1` and `freetoken.token.<token>`, of
which only the first is ever answered; or it offers none and sends `{"token": "..."}` as its first message. The token is
never taken from a URL: those are logged. Pure. Does not know sockets, nor the token.
"""

from __future__ import annotations

import msgspec

PROTOCOL = "freetoken.v1"
FIRST_MESSAGE_S = 5.0  # for the first message with the token
REFUSED = 4401  # close code: that message did not come, or was wrong

_TOKEN = b"freetoken.token."


class _First(msgspec.Struct, forbid_unknown_fields=True):
    token: str


def offered(header: bytes | None) -> tuple[bool, bytes | None]:
    """Of Sec-WebSocket-Protocol: whether our protocol is among them, and the token among them."""
    names = [name.strip() for name in (header or b"").split(b",")]
    tokens = [name.removeprefix(_TOKEN) for name in names if name.startswith(_TOKEN)]
    return PROTOCOL.encode() in names, tokens[0] if len(tokens) == 1 else None


def token_in(message: str | bytes | None) -> bytes | None:
    """The token in a first message; None where it is anything else."""
    try:
        return msgspec.json.decode(message or b"", type=_First).token.encode()
    except msgspec.DecodeError:
        return None
