"""The hub's token: where it is looked up, every time it is needed, and how one is set. It is never shown.

Environment before file, as for all settings: HF_TOKEN, then hub-token.json in the state folder (0600), then the file
that Hugging Face's own tools keep after a login. Does not know who asks for it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from freetoken.core.errors import SettingError
from freetoken.daemon.store import Home, read_json, write_json

Origin = Literal["environment", "state folder", "huggingface"]
_TOKEN = re.compile(r"[\x21-\x7e]{1,512}")  # what an HTTP header can carry


@dataclass(frozen=True, slots=True)
class HubToken:
    """Call it for the token, or None."""

    home: Home
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False)

    def __call__(self) -> str | None:
        found = self._found()
        return found[1] if found else None

    @property
    def origin(self) -> Origin | None:
        """Where the token comes from; None where there is none."""
        found = self._found()
        return found[0] if found else None

    def set(self, token: str | None) -> None:
        """Keeps `token` in the state folder; None forgets the one kept there. Raises SettingError."""
        if token is None:
            self._file.unlink(missing_ok=True)
            return
        if not _TOKEN.fullmatch(token):
            raise SettingError("That is no token of the hub: it has spaces, control characters or none at all.")
        write_json(self._file, {"token": token})

    @property
    def _file(self) -> Path:
        return self.home.root / "hub-token.json"

    def _found(self) -> tuple[Origin, str] | None:
        tools = Path(self.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser() / "token"
        kept = read_json(self._file)
        places: tuple[tuple[Origin, str], ...] = (
            ("environment", self.environ.get("HF_TOKEN", "")),
            ("state folder", str(kept.get("token", "")) if isinstance(kept, dict) else ""),
            ("huggingface", _text(tools)),
        )
        return next(((origin, text) for origin, text in places if _TOKEN.fullmatch(text)), None)


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii").strip()
    except (OSError, ValueError):  # none is kept there
        return ""
