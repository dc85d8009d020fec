"""Settings from their four sources, later ones winning: default, settings.json, environment, flags.

The only reader of os.environ. Remembers where each value came from, because "the port you gave" and "the default port"
are treated differently and because an error must name its source.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from freetoken.core.errors import SettingError
from freetoken.settings.schema import KNOBS, Knob, Settings, Value, suggestion

DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings and, by name, the source of each: `default`, `settings.json`, `environment X` or `flag --x`."""

    settings: Settings
    sources: Mapping[str, str]

    def given(self, name: str) -> bool:
        """Whether somebody chose this value."""
        return self.sources[name] != DEFAULT

    def load_options(self) -> dict[str, Value]:
        """The load knobs that somebody chose, as `POST /api/v1/engine/load` takes them in `options`."""
        return {
            k.name: getattr(self.settings, k.name) for k in KNOBS.values() if k.scope == "load" and self.given(k.name)
        }


def load(flags: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None) -> Loaded:
    """All settings. `flags` maps names to raw or typed values, None meaning "not given"; `environ` is for tests.

    Raises SettingError naming the source of the bad value.
    """
    env = os.environ if environ is None else environ
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    folder = home(env) if "home" not in given else Path(str(given["home"])).expanduser().absolute()
    values: dict[str, Value] = {"home": folder}
    sources = dict.fromkeys(KNOBS, DEFAULT)
    for source, layer in (_file_layer(folder), _env_layer(env), _flag_layer(given)):
        for name, raw in layer.items():
            origin = _origin(source, KNOBS[name])
            values[name] = _parse(KNOBS[name], raw, origin) if name != "home" else folder
            sources[name] = origin
    return Loaded(_with_key(Settings(**values), sources), sources)  # type: ignore[arg-type]


def home(environ: Mapping[str, str] | None = None) -> Path:
    """The state folder: FREETOKEN_HOME, else ~/.freetoken. Absolute; not looked at."""
    env = os.environ if environ is None else environ
    return Path(env.get("FREETOKEN_HOME") or str(KNOBS["home"].default)).expanduser().absolute()


def child_environment() -> dict[str, str]:
    """The environment for a process of ours that has no business with our secrets."""
    secrets = {knob.env for knob in KNOBS.values() if knob.secret}
    return {name: value for name, value in os.environ.items() if name not in secrets}


def parse_options(options: Mapping[str, object], source: str = "options") -> dict[str, Value]:
    """The options of one load, typed; only knobs of scope `load` exist here, so no path or command can come in.

    Raises SettingError naming the option.
    """
    parsed: dict[str, Value] = {}
    for name, raw in options.items():
        if name not in KNOBS or KNOBS[name].scope != "load":
            known = ", ".join(k.name for k in KNOBS.values() if k.scope == "load")
            raise SettingError(
                f"{name!r} is not an option of a load{suggestion(name, 'load')}.",
                param=name,
                fixes=(f"Use one of: {known}",),
            )
        if raw is not None:
            parsed[name] = _parse(KNOBS[name], raw, f"{source}.{name}")
    return parsed


def _parse(knob: Knob, raw: object, origin: str) -> Value:
    try:
        return knob.parse(raw)
    except (ValueError, TypeError) as error:
        detail = f"{origin}: it cannot be read" if knob.secret else f"{origin}: {error}."
        raise SettingError(detail, param=knob.name) from None


def _origin(source: str, knob: Knob) -> str:
    return {"file": "settings.json", "environment": f"environment {knob.env}", "flag": f"flag {knob.flag}"}[source]


def _file_layer(folder: Path) -> tuple[str, dict[str, object]]:
    path = folder / "settings.json"
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return "file", {}
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise SettingError(f"settings.json cannot be read: {error}.", fixes=(f"Correct or remove {path}",)) from None
    if not isinstance(content, dict):
        raise SettingError("settings.json must hold one JSON object.", fixes=(f"Correct or remove {path}",))
    for name in content:
        if name not in KNOBS or not KNOBS[name].in_file:
            raise SettingError(f"settings.json: {name!r} is not a setting of the file{suggestion(name)}.", param=name)
    return "file", {name: value for name, value in content.items() if value is not None}


def _env_layer(env: Mapping[str, str]) -> tuple[str, dict[str, object]]:
    return "environment", {k.name: env[k.env] for k in KNOBS.values() if k.env and env.get(k.env, "") != ""}


def _flag_layer(flags: Mapping[str, object]) -> tuple[str, dict[str, object]]:
    for name in flags:
        if name not in KNOBS:
            raise SettingError(f"{name!r} is not a setting{suggestion(name)}.", param=name)
    return "flag", {name: value for name, value in flags.items() if value is not False}


def _with_key(settings: Settings, sources: dict[str, str]) -> Settings:
    """Reads the key from its file, where a file is named and the environment gives no key."""
    if settings.api_key is not None or settings.api_key_file is None:
        return settings
    origin = sources["api_key_file"]
    try:
        lines = settings.api_key_file.read_text("utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"{origin}: the key file cannot be read: {error}.", param="api_key_file") from None
    if not lines:
        raise SettingError(f"{origin}: the key file is empty.", param="api_key_file")
    sources["api_key"] = origin
    return replace(settings, api_key=lines[0])
