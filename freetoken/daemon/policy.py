"""Who is let through, as values: secrets, names, origins; and the rule that an open address needs a key. Pure.

Does not know requests (guard.py).
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from freetoken.core.errors import BindRefused
from freetoken.settings.schema import Settings

LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})
APP_ORIGINS = frozenset({"tauri://localhost", "http://tauri.localhost", "https://tauri.localhost"})
DEV_ORIGIN = "http://localhost:1420"


@dataclass(frozen=True, slots=True, repr=False)  # no repr: it holds the secrets
class Policy:
    """What is let through."""

    token: str
    api_key: str | None
    hosts: frozenset[str]
    any_address: bool  # bound beyond loopback: address literals are fine as Host, a rebinding attack needs a name
    origins: frozenset[str]
    any_origin: bool  # for /v1 alone

    @classmethod
    def of(cls, settings: Settings, token: str, port: int) -> Policy:
        """Raises BindRefused for an address beyond this machine without a key."""
        beyond = not is_loopback(settings.host)
        if beyond and settings.api_key is None:
            raise BindRefused(
                f"{settings.host} can be reached from other machines, and no API key is set.",
                fixes=("Set FREETOKEN_API_KEY or --api-key-file", "Use --host 127.0.0.1"),
            )
        hosts = LOOPBACK | {_bracketed(settings.host), *map(str.lower, settings.allowed_hosts)}
        own = {f"http://{host}:{port}" for host in hosts}
        origins = own | APP_ORIGINS | set(settings.cors_origins) | ({DEV_ORIGIN} if settings.dev_origins else set())
        return cls(
            token=token,
            api_key=settings.api_key,
            hosts=hosts,
            any_address=beyond,
            origins=frozenset(origins - {"*"}),
            any_origin="*" in settings.cors_origins,
        )


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine reach a socket bound to `host`."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host.lower()
