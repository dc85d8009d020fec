"""What every verb that talks to a daemon does first: find it, and see that it is ours."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from freetoken.core.errors import UsageError
from freetoken.settings.load import load

if TYPE_CHECKING:
    from freetoken.client.control import ControlClient


def connect() -> ControlClient:
    """A client of the running daemon of this state folder. Raises DaemonNotReachable where none runs."""
    from freetoken.client.control import ControlClient
    from freetoken.client.discovery import find

    settings = load().settings
    client = ControlClient(find(settings.home), api_key=settings.api_key)
    client.live()
    return client


def model_argument(text: str) -> str:
    """What a user typed for a model as the API takes it: an id, or the absolute path of a folder or .gguf file.

    A path is what looks like one: it begins with `.`, `/`, `~` or a drive, or ends in .gguf. Anything else is an id,
    whatever lies in the working folder. Raises UsageError for a path where nothing is.
    """
    path = Path(text).expanduser()
    if not (text.startswith((".", "~")) or path.is_absolute() or path.suffix == ".gguf"):
        return text
    if not path.exists():
        fixes = ("give a model id, or the path of a folder that is there",)
        raise UsageError(f"there is no folder or file {path}", fixes=fixes)
    return str(path.resolve())
