"""The schema is whole, and the generated page is the schema's."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from freetoken.plan.choices import Requested
from freetoken.settings.render import settings_markdown
from freetoken.settings.schema import KNOBS, Settings

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text("utf-8") == settings_markdown(), "python -m freetoken.settings.render > docs/settings.md"


def test_load_options_are_exactly_what_a_plan_can_be_asked_for() -> None:
    options = {knob.name for knob in KNOBS.values() if knob.scope == "load"}
    assert options == {field.name for field in dataclasses.fields(Requested)}


def test_names_flags_and_environment_are_unique_and_every_default_passes_its_own_check() -> None:
    for attribute in ("flag", "env"):
        given = [value for knob in KNOBS.values() if (value := getattr(knob, attribute))]
        assert len(given) == len(set(given))
    for knob in KNOBS.values():
        assert knob.help.endswith(".") and (knob.default is None or knob.parse(knob.default) == knob.default)
    assert set(KNOBS) == {field.name for field in dataclasses.fields(Settings)}
    assert KNOBS["api_key"].flag is None, "a key on a command line is seen by every user of the machine"
