"""Every knob, once: type, unit, help, default, bounds, environment name, flag. Pure.

A setting is one field of `Settings`; arguments, environment, file and docs/settings.md follow from it. Does not know
where a value comes from (load.py) nor what is done with it. A load knob that is None is decided by the plan.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from freetoken.core.registry import Registry
from freetoken.core.units import Bytes, Seconds

Kind = Literal["int", "float", "bytes", "seconds", "str", "path", "switch", "origins", "names"]
Scope = Literal["start", "daemon", "load"]  # one command's own; read when the daemon starts; given anew with each load
Value = int | float | str | bool | Path | tuple[str, ...] | None

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(:[0-9]{1,5})?", re.IGNORECASE)
_TRUE, _FALSE = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True, slots=True)
class Knob:
    """What is known about one setting."""

    name: str
    kind: Kind
    default: Value
    help: str
    scope: Scope
    unit: str = ""
    flag: str | None = None
    env: str | None = None
    in_file: bool = True
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    secret: bool = False

    def parse(self, raw: object) -> Value:
        """`raw` (text, or a JSON value) as this knob's type. Raises ValueError with a sentence that fits after it."""
        if raw is None:
            return self.default
        value: Value = _PARSERS[self.kind](raw)
        if self.choices and value not in self.choices:
            raise ValueError(f"{raw!r} is not one of {', '.join(self.choices)}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            self._check_bounds(value)
        return value

    def shown(self, value: float) -> str:
        """A number of this knob for people: sizes in binary multiples."""
        return str(Bytes(value)) if self.kind == "bytes" else f"{value:g}"

    def _check_bounds(self, value: float) -> None:
        low, high = self.minimum, self.maximum
        if (low is not None and value < low) or (high is not None and value > high):
            least = self.shown(low or 0)
            wanted = f"at least {least}" if high is None else f"between {least} and {self.shown(high)}"
            unit = f" {self.unit}" if self.unit else ""
            raise ValueError(f"{self.shown(value)} is out of range: it must be {wanted}{unit}")


def _int(raw: object) -> int:
    if isinstance(raw, bool) or (isinstance(raw, float) and not raw.is_integer()):
        raise ValueError(f"{raw!r} is not a whole number")
    try:
        return int(str(raw).replace("_", "")) if isinstance(raw, str) else int(raw)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        raise ValueError(f"{raw!r} is not a whole number") from None


def _float(raw: object) -> float:
    if isinstance(raw, bool) or not isinstance(raw, int | float | str):
        raise ValueError(f"{raw!r} is not a number")
    try:
        number = float(raw)
    except ValueError:
        raise ValueError(f"{raw!r} is not a number") from None
    if number != number or number in (float("inf"), float("-inf")):
        raise ValueError(f"{raw!r} is not a finite number")
    return number


def _switch(raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    word = str(raw).strip().lower()
    if word not in _TRUE | _FALSE:
        raise ValueError(f"{raw!r} is not yes or no: use true or false")
    return word in _TRUE


def _str(raw: object) -> str:
    if not isinstance(raw, str) or not raw.strip():
        raise ValueError(f"{raw!r} is not a text")
    return raw.strip()


def _names(raw: object) -> tuple[str, ...]:
    if isinstance(raw, str):
        raw = raw.split(",")
    if not isinstance(raw, list | tuple):
        raise ValueError(f"{raw!r} is not a list of names separated by commas")
    return tuple(_str(item) for item in raw if str(item).strip())


def _origins(raw: object) -> tuple[str, ...]:
    origins = tuple(origin.rstrip("/") for origin in _names(raw))
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ValueError(f"{origin!r} is not an origin: write scheme://host[:port], such as tauri://localhost")
    return origins


_PARSERS: dict[Kind, Callable[[Any], Value]] = {
    "int": _int,
    "float": _float,
    "bytes": lambda raw: int(Bytes.parse(raw)) if isinstance(raw, str) else _int(raw),
    "seconds": lambda raw: float(Seconds.parse(raw)) if isinstance(raw, str) else _float(raw),
    "str": _str,
    "path": lambda raw: Path(_str(raw)).expanduser() if isinstance(raw, str) else Path(raw),
    "switch": _switch,
    "names": _names,
    "origins": _origins,
}


def knob(kind: Kind, default: Value, help: str, *, scope: Scope = "daemon", **facts: Any) -> Any:
    """A field of Settings. `facts` are Knob's; without `env` a daemon knob is read from FREETOKEN_<NAME>."""
    return dataclasses.field(default=default, metadata={"kind": kind, "help": help, "scope": scope, **facts},
                             repr=not facts.get("secret", False))  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Every setting with its value. Field order is the order of the documentation."""

    # ── where things are ──
    home: Path = knob("path", Path("~/.freetoken"), "The state folder: models, logs, token.", in_file=False)  # noqa: RUF009
    host: str = knob(
        "str", "127.0.0.1", "Address to listen on; one beyond this machine needs an API key.", flag="--host"
    )
    port: int = knob(
        "int",
        1919,
        "Port of both APIs; 0 takes any free one. The default moves up when a stranger holds it.",
        flag="--port",
        minimum=0,
        maximum=65535,
    )

    # ── who may call ──
    api_key_file: Path | None = knob(  # noqa: RUF009
        "path",
        None,
        "File whose first line is the key that /v1 asks for (Authorization: Bearer).",
        flag="--api-key-file",
    )
    api_key: str | None = knob("str", None, "The key itself; from the environment only.", in_file=False, secret=True)
    cors_origins: tuple[str, ...] = knob(
        "origins",
        (),
        "More web origins that may call, separated by commas; * opens /v1 (never the control API) to every origin.",
        flag="--cors-origins",
    )
    dev_origins: bool = knob(
        "switch", False, "Also allow http://localhost:1420 (Tauri's dev server).", flag="--dev-origins"
    )
    allowed_hosts: tuple[str, ...] = knob(
        "names", (), "More names that the Host header may carry, without port.", flag="--allowed-hosts"
    )

    # ── deadlines ──
    load_deadline_s: float = knob(
        "seconds", 600.0, "Longest time a request waits for a model that is loading.", unit="s", minimum=1
    )
    load_stall_s: float = knob(
        "seconds", 180.0, "A load that reports no progress for this long has failed.", unit="s", minimum=1
    )
    stop_deadline_s: float = knob(
        "seconds", 10.0, "Time an engine gets to end by itself before it is killed.", unit="s", minimum=0
    )

    # ── the engine's life ──
    idle_unload_s: float = knob(
        "seconds", 0.0, "Unload the model after so long without a request; 0 never does.", unit="s", minimum=0
    )
    load_on_start: str = knob(
        "str", "none", "Model to load when the daemon starts: the last one in use, or none.", choices=("none", "last")
    )
    autoload: bool = knob(
        "switch", False, "Load the model that a request to /v1 names, in the place of the loaded one."
    )
    orphan_grace_s: float = knob(
        "seconds",
        60.0,
        "Time an engine lives on without its daemon, for a new one to take it over.",
        unit="s",
        minimum=0,
        maximum=3600,
    )

    # ── what one command asks for ──
    model: str | None = knob(
        "str", None, "Model to load at once: an id or a folder.", scope="start", flag="--model", in_file=False
    )
    demo: bool = knob("switch", False, "Load the demo model at once.", scope="start", flag="--demo", in_file=False)

    # ── options of a load ──
    max_running_requests: int | None = knob(
        "int",
        None,
        "Requests computed at the same time.",
        scope="load",
        flag="--max-running-requests",
        minimum=1,
        maximum=1024,
    )
    max_seq_len: int | None = knob(
        "int",
        None,
        "A shorter context window than the model's.",
        scope="load",
        unit="tokens",
        flag="--max-seq-len-override",
        minimum=16,
    )
    max_prefill_tokens: int | None = knob(
        "int",
        None,
        "Longest piece of prompts computed in one step.",
        scope="load",
        unit="tokens",
        flag="--max-prefill-length",
        minimum=1,
    )
    memory_ratio: float | None = knob(
        "float",
        None,
        "Part of the free memory that may be used.",
        scope="load",
        flag="--memory-ratio",
        minimum=0.05,
        maximum=0.98,
    )
    num_tokens: int | None = knob(
        "int", None, "Size of the KV pool in tokens.", scope="load", unit="tokens", flag="--num-tokens", minimum=16
    )
    num_pages: int | None = knob(
        "int",
        None,
        "Size of the KV pool in pages of 16 tokens.",
        scope="load",
        unit="pages",
        flag="--num-pages",
        minimum=1,
    )
    kv_reserve_tokens: int | None = knob(
        "int",
        None,
        "Least size of the KV pool in tokens; --num-tokens sets it exactly.",
        scope="load",
        unit="tokens",
        flag="--kv-reserve-tokens",
        minimum=16,
    )
    moe_backend: str | None = knob(
        "str",
        None,
        "Where experts are computed: all in VRAM, misses fetched, or misses on the CPU.",
        scope="load",
        flag="--moe-backend",
        choices=("auto", "resident", "offload", "cpu"),
    )
    moe_cache_size: int | None = knob(
        "int", None, "Experts kept in VRAM, over all layers.", scope="load", flag="--moe-cache-size", minimum=0
    )
    moe_cache_rate: float | None = knob(
        "float",
        None,
        "The same as a part of all experts.",
        scope="load",
        flag="--moe-cache-rate",
        minimum=0,
        maximum=1,
    )
    vram_limit: int | None = knob(
        "bytes", None, "Most VRAM that may be used.", scope="load", flag="--vram-limit", minimum=1 << 20
    )
    gpu: str | None = knob("str", None, "UUID of the GPU to use.", scope="load", flag="--gpu")
    dtype: str | None = knob(
        "str",
        None,
        "How unquantised weights are kept in memory.",
        scope="load",
        flag="--dtype",
        choices=("float32", "bfloat16"),
    )
    threads: int | None = knob(
        "int", None, "CPU threads that compute.", scope="load", flag="--threads", minimum=1, maximum=1024
    )
    max_queued: int | None = knob(
        "int", None, "Requests that may wait; more are refused with 429.", scope="load", flag="--max-queued", minimum=0
    )
    queue_deadline_s: float | None = knob(
        "seconds", None, "Longest time in the queue.", scope="load", unit="s", flag="--queue-deadline", minimum=1
    )


def _knob_of(field: Any) -> Knob:
    facts = {"env": None if field.metadata["scope"] == "start" else f"FREETOKEN_{field.name.upper()}", **field.metadata}
    return Knob(name=field.name, default=field.default, **facts)


KNOBS: Registry[Knob] = Registry("setting", {field.name: _knob_of(field) for field in dataclasses.fields(Settings)})


def suggestion(name: str, scope: Scope | None = None) -> str:
    """The setting that `name` was probably meant to be, as ` (did you mean x?)`; empty where none is near."""
    near = difflib.get_close_matches(name, [k.name for k in KNOBS.values() if scope in (None, k.scope)], n=1)
    return f" (did you mean {near[0]}?)" if near else ""
