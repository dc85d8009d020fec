"""One examination: late and broken readers, redaction, the page of docs."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from freetoken.daemon.doctor import examine as examination
from freetoken.daemon.doctor.examine import Reader, examine, gather, readers
from freetoken.daemon.doctor.facts import Facts
from freetoken.daemon.doctor.render import troubleshooting_markdown
from freetoken.daemon.doctor.table import CHECKS
from freetoken.daemon.doctor.verdict import Status, Unknown
from freetoken.daemon.store import open_home, read_or_make_token
from freetoken.settings.schema import Settings

PAGE = Path(__file__).parents[3] / "docs" / "troubleshooting.md"


def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home")


def test_a_reader_for_each_fact(tmp_path: Path) -> None:
    assert list(readers(settings(tmp_path))) == [field.name for field in fields(Facts)]


def test_a_late_and_a_broken_reader_cost_only_their_own_facts(tmp_path: Path) -> None:
    release = threading.Event()

    def breaks() -> object:
        raise OSError("the disk is on fire")

    asked: dict[str, Reader] = dict.fromkeys(readers(settings(tmp_path)), lambda: "read")
    asked |= {"gpus": lambda: release.wait(60), "torch": breaks}
    began = time.monotonic()
    facts = gather(asked, 0.5)
    release.set()
    assert time.monotonic() - began < 5.0
    assert facts.gpus == Unknown("there was no answer within 0.5 s")
    assert facts.torch == Unknown("OSError: the disk is on fire")
    assert facts.system == "read"


def test_the_real_machine(tmp_path: Path) -> None:
    report = examine(settings(tmp_path))
    assert [result.id for result in report.results] == [check.id for check in CHECKS]
    assert sum(report.summary.values()) == len(CHECKS)
    broken = [r.detail for r in report.results if "The check itself failed" in r.detail or "Error:" in r.detail]
    assert broken == []
    assert not (tmp_path / "home").exists(), "to look changes nothing"


def test_no_secret_and_no_home_folder_gets_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    home = open_home(tmp_path / "home")
    token = read_or_make_token(home)
    leaky = f"{tmp_path}/x {token} k3y\x1b[31m"
    real = readers

    def leaking(given: Settings) -> Mapping[str, Reader]:
        def fail() -> Any:
            raise OSError(leaky)

        return {**real(given), "gpus": fail, "system": lambda: leaky}

    monkeypatch.setattr(examination, "readers", leaking)
    report = examine(Settings(home=home.root, api_key="k3y"))
    text = "\n".join(str(result.to_json()) for result in report.results)
    assert "~/x [secret] [secret]" in text
    for leak in (token, "k3y", str(tmp_path), "\x1b"):
        assert leak not in text
    assert report.results[0].status is Status.INCONCLUSIVE


def test_the_page_is_generated() -> None:
    want = troubleshooting_markdown()
    assert PAGE.read_text("utf-8") == want, "python -m freetoken.daemon.doctor.render > docs/troubleshooting.md"
