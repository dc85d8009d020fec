"""Strict reader of config.json: what a model needs is needed, what is not understood is refused. Pure.

Two dialects are read alike: original files (rope_theta, rope_scaling) and those saved again by transformers 5
(rope_parameters). A class default of transformers is not the model's value, so families need() the keys that matter.
Does not know families.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from freetoken.catalog.spec import RopeScaling, RopeSpec
from freetoken.core.errors import ConfigInvalid, UnsupportedEncoding

_LARGEST = 1 << 31  # no dimension, count or token id is beyond it


@dataclass(frozen=True, slots=True)
class Config:
    """A JSON object with typed, checked access. null counts as absent, as transformers writes it for "not set"."""

    values: Mapping[str, object]
    where: str = "config.json"

    def has(self, key: str) -> bool:
        """Whether the key is there, be it null."""
        return key in self.values

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int = _LARGEST) -> int:
        """An integer in [least, most]. Raises ConfigInvalid, also where it is absent and has no default."""
        value = self._value(key, default)
        if type(value) is not int or not least <= value <= most:
            raise self.invalid(key, value, f"an integer from {least} to {most}")
        return value

    def number(self, key: str, default: float | None = None, *, least: float | None = None) -> float:
        """A number below 1e30, above 0 or, where `least` is given, from there on."""
        match self._value(key, default):
            case (int() | float()) as value if not isinstance(value, bool) and (
                0 < value < 1e30 if least is None else least <= value < 1e30
            ):
                return float(value)
            case value:
                raise self.invalid(key, value, "a number above 0" if least is None else f"a number from {least:g} on")

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.invalid(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.invalid(key, value, "a string")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of integers >= 0; empty where absent. One value counts as a list of one, here and below."""
        entries = self._entries(key)
        if not all(type(entry) is int and 0 <= entry <= _LARGEST for entry in entries):
            raise self.invalid(key, entries, "a list of integers")
        return tuple(entries)

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings; empty where absent."""
        entries = self._entries(key)
        if not all(isinstance(entry, str) for entry in entries):
            raise self.invalid(key, entries, "a list of strings")
        return tuple(entries)

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of numbers in (0, 1e30); empty where absent."""
        entries = self._entries(key)
        if not all(type(entry) in (int, float) and 0 < entry < 1e30 for entry in entries):
            raise self.invalid(key, entries, "a list of numbers above 0")
        return tuple(float(entry) for entry in entries)

    def section(self, key: str) -> Config | None:
        """The nested object, or None where absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.invalid(key, value, "an object")
        return Config(value, f"{self.where}: {key}")

    def refuse(self, key: str, *unless: object) -> None:
        """Raise ConfigInvalid where the key has a value that changes what is computed in a way not built here."""
        value = self.values.get(key)
        if value is not None and value not in unless:
            allowed = " or ".join(map(str, unless))
            raise self.invalid(key, value, f"absent{' or ' + allowed if allowed else ''}: nothing else is supported")

    def invalid(self, key: str, value: object, wanted: str) -> ConfigInvalid:
        if value is None:
            return ConfigInvalid(f"{self.where} lacks {key}, which this model needs", param=key)
        return ConfigInvalid(f"{self.where}: {key} is {str(value)[:80]}, expected {wanted}", param=key)

    def _value(self, key: str, default: object) -> object:
        value = self.values.get(key)
        return default if value is None else value

    def _entries(self, key: str) -> list[Any]:
        value = self.values.get(key)
        return [] if value is None else value if isinstance(value, list) else [value]


def refuse_quantized(config: Config, supported: tuple[str, ...]) -> None:
    """Raise UnsupportedEncoding where the configuration says that the weights are quantised, naming the method."""
    for key in ("quantization_config", "compression_config"):
        section = config.section(key)
        if section is not None:
            method = section.text("quant_method", section.text("quant_algo", "unnamed"))
            raise UnsupportedEncoding(
                f"the weights are quantised with {method[:60]!r}; supported are {', '.join(supported)}",
                fixes=("use the unquantised version of the model, or a GGUF file of a supported type",),
            )


# ── rope ────────────────────────────────────────────────────────────────────────────────────────────────────────────
def rope_spec(config: Config, head_dim: int, *, theta: float = 1e4) -> RopeSpec:
    """The rotary embedding over a whole head, with `theta` for files that give none.

    Raises ConfigInvalid for a kind of scaling that is not known; "dynamic" is refused: its frequencies change with the
    length, which would make cached keys stale.
    """
    rope = Config(_rope_values(config), f"{config.where}: rope parameters")
    base = rope.number("rope_theta", theta)
    kind = rope.text("rope_type", "default")
    window = config.integer("max_position_embeddings")
    if head_dim % 2:
        raise config.invalid("head_dim", head_dim, "an even number")
    match kind:
        case "default":
            return RopeSpec(base, head_dim)
        case "linear":
            return RopeSpec(base, head_dim, scaling=RopeScaling("linear", rope.number("factor")))
        case "llama3":
            return RopeSpec(base, head_dim, scaling=_llama3(rope, window))
        case "yarn":
            scaling = _yarn(rope, window)
            return RopeSpec(base, head_dim, scaling=scaling, attn_factor=_yarn_attention(rope, scaling.factor))
        case "longrope":
            scaling = _longrope(rope, window, head_dim)
            return RopeSpec(base, head_dim, scaling=scaling, attn_factor=_longrope_attention(rope, scaling))
    raise rope.invalid("rope_type", kind, "default, linear, llama3, yarn or longrope")


def mscale(factor: float, weight: float = 1.0) -> float:
    """YaRN's attention temperature (arXiv 2309.00071, section 3.4): 0.1 weight ln(factor) + 1 beyond factor 1."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _rope_values(config: Config) -> dict[str, object]:
    """One flat object out of either dialect; the newer spelling wins over keys beside it."""
    values: dict[str, object] = {}
    for key in ("rope_theta", "original_max_position_embeddings"):
        if config.values.get(key) is not None:
            values[key] = config.values[key]
    for key in ("rope_scaling", "rope_parameters"):
        section = config.section(key)
        values |= {} if section is None else {k: v for k, v in section.values.items() if v is not None}
    if any(isinstance(value, dict) for value in values.values()):
        raise ConfigInvalid(f"{config.where} has rope parameters for each layer type: not supported for this family")
    if "rope_type" not in values and "type" in values:
        values["rope_type"] = values["type"]
    return values


def _llama3(rope: Config, window: int) -> RopeScaling:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if not low < high:
        raise rope.invalid("low_freq_factor", low, f"less than high_freq_factor, {high:g}")
    original = rope.integer("original_max_position_embeddings", window)
    return RopeScaling("llama3", rope.number("factor"), original, low=low, high=high)


def _yarn(rope: Config, window: int) -> RopeScaling:
    original = rope.integer("original_max_position_embeddings", window)
    return RopeScaling(
        "yarn",
        rope.number("factor", window / original),
        original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
    )


def _yarn_attention(rope: Config, factor: float) -> float:
    if rope.has("attention_factor"):
        return rope.number("attention_factor")
    one, all_dims = rope.number("mscale", 0.0, least=0), rope.number("mscale_all_dim", 0.0, least=0)
    return mscale(factor, one) / mscale(factor, all_dims) if one and all_dims else mscale(factor)


def _longrope(rope: Config, window: int, head_dim: int) -> RopeScaling:
    original = rope.integer("original_max_position_embeddings", window)
    short, long = rope.numbers("short_factor"), rope.numbers("long_factor")
    for key, factors in (("short_factor", short), ("long_factor", long)):
        if len(factors) != head_dim // 2:
            raise rope.invalid(key, f"a list of {len(factors)}", f"{head_dim // 2} numbers, one for each frequency")
    return RopeScaling("longrope", rope.number("factor", window / original), original, short=short, long=long)


def _longrope_attention(rope: Config, scaling: RopeScaling) -> float:
    if rope.has("attention_factor"):
        return rope.number("attention_factor")
    if scaling.factor <= 1 or scaling.original <= 1:
        return 1.0
    return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original))
