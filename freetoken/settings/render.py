"""docs/settings.md from the schema. Pure; `python -m freetoken.settings.render > docs/settings.md` writes it."""

from __future__ import annotations

from freetoken.settings.schema import KNOBS, Knob, Scope

_HEAD = """# Settings

Generated from `freetoken/settings/schema.py`. Later sources win: default, `settings.json` in the state folder,
environment, flags. Sizes take `MiB`, `GiB`, `MB`, `GB`; durations `ms`, `s`, `min`, `h`.
"""
_SECTIONS: tuple[tuple[Scope, str, str], ...] = (
    ("daemon", "The daemon", "Read once, when the daemon starts."),
    ("start", "One command", "Flags of `ft serve` alone."),
    ("load", "One load", "Flags of `ft serve` and `ft load`, and `options` of `POST /api/v1/engine/load`. "
                         "An empty default is decided by the plan, which says why."),
)  # fmt: skip


def settings_markdown() -> str:
    """The whole page."""
    return _HEAD + "".join(_section(scope, title, lead) for scope, title, lead in _SECTIONS)


def _section(scope: Scope, title: str, lead: str) -> str:
    rows = "".join(_row(knob) for knob in KNOBS.values() if knob.scope == scope)
    head = "| setting | default | flag | environment | what it does |\n|---|---|---|---|---|\n"
    return f"\n## {title}\n\n{lead}\n\n{head}{rows}"


def _row(knob: Knob) -> str:
    notes = [knob.help]
    if knob.choices:
        notes.append(f"One of {', '.join(f'`{choice}`' for choice in knob.choices)}.")
    if knob.minimum is not None:
        least = knob.shown(knob.minimum)
        notes.append(f"At least {least}." if knob.maximum is None else f"{least} to {knob.shown(knob.maximum)}.")
    return f"| `{knob.name}` | {_default(knob)} | {_code(knob.flag)} | {_code(knob.env)} | {' '.join(notes)} |\n"


def _default(knob: Knob) -> str:
    if knob.default in (None, ()):
        return ""
    text = f"{knob.default:g}" if isinstance(knob.default, float) else str(knob.default).lower()
    return f"{text} {knob.unit}".strip()


def _code(text: str | None) -> str:
    return f"`{text}`" if text else ""


if __name__ == "__main__":
    print(settings_markdown(), end="")
