"""A plan from end to end: what `ft plan` says is what a load does, what a load took is what the next plan knows."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Person

pytestmark = pytest.mark.slow


def compared(person: Person, wanted: list[dict[str, Any]], listening: threading.Event) -> None:
    """Puts the data of the next plan.compared into `wanted`."""
    with person.control() as control:
        for event in control.events():
            listening.set()
            if event.type == "plan.compared":
                wanted.append(event.data)
                return


def test_a_load_is_compared_with_its_plan_and_the_next_plan_learns(person: Person, demo: Path) -> None:
    foretold = person.ft_json("plan", "demo")
    with person.daemon():
        told: list[dict[str, Any]] = []
        listening = threading.Event()
        listener = threading.Thread(target=compared, args=(person, told, listening), daemon=True)
        listener.start()
        assert listening.wait(20)
        person.ft("load", "demo")
        listener.join(20)
        engine = person.ft_json("status")
    assert engine["plan"]["resolved"]["num_pages"] == foretold["resolved"]["num_pages"]
    lines = {line["line"]: line for line in told[0]["lines"]}
    for name in ("weights", "kv_pages"):
        assert lines[name]["predicted_bytes"] == lines[name]["measured_bytes"], name
    assert 0 < told[0]["total_measured_bytes"] <= told[0]["total_predicted_bytes"] == engine["plan"]["total_bytes"]
    log = (person.home / "logs" / "engine.log").read_text()
    assert "plan: " in log and "kv_pages" in log and "loaded: " in log

    known = json.loads((person.home / "cache" / "residuals.json").read_text())
    (seen,) = [devices["cpu"]["allocator"] for path, devices in known.items() if path == str(demo)]
    with person.daemon():
        person.ft("load", "demo")
        again = person.ft_json("status")["plan"]
    (line,) = [line for line in again["ledger"] if line["line"] == "allocator"]
    assert "seen in the last load" in line["detail"] and line["bytes"] >= seen


def test_a_load_that_does_not_fit_is_refused_with_flags_that_work(person: Person) -> None:
    with person.daemon():
        refused = person.ft("load", "demo", "--num-tokens", "100000000", code=6)
        (fix,) = [line for line in refused.stderr.splitlines() if "--num-tokens" in line and "fix:" in line]
        largest = fix.split("--num-tokens ")[1].split()[0]
        assert int(largest) > 0 and f"{int(largest):,} is the largest that fits" in refused.stderr
        planned = person.ft("plan", "demo", "--num-tokens", str(int(largest) // 2))
        assert "effective context" in planned.stdout
