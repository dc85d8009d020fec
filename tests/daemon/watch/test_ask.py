"""A child that hangs, crashes, floods or lies costs a deadline and no more; real processes."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from freetoken.daemon.watch.ask import NoAnswer, ask
from tests.fakes.probe_child import command

PROMPT_S = 5.0  # bound for "at once" on a loaded machine


def reason(*arguments: str, deadline_s: float = PROMPT_S) -> str:
    answer = ask(command(*arguments), deadline_s)
    assert isinstance(answer, NoAnswer)
    return answer.reason


def test_a_document_comes_through() -> None:
    assert ask(command("say", '{"a": [1, null, "ü"]}'), PROMPT_S) == {"a": [1, None, "ü"]}


def test_one_that_hangs_is_given_up_at_the_deadline() -> None:
    began = time.monotonic()
    assert reason("hang", deadline_s=0.6) == "no answer within 0.6 s"
    assert time.monotonic() - began < 0.6 + PROMPT_S
    assert not [child for child in psutil.Process().children() if "probe_child.py" in " ".join(child.cmdline())]


def test_what_it_started_ends_with_it(tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    assert reason("orphan", str(noted), deadline_s=2.0).startswith("no answer")
    pid, until = int(noted.read_text()), time.monotonic() + PROMPT_S
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until, "the grandchild lives on"
        time.sleep(0.02)


def test_a_crash_is_named_with_its_last_words() -> None:
    assert reason("crash") == "it crashed (SIGABRT): libnvidia: unexpected state"
    assert reason("fail") == "it crashed (exit code 1): the card has fallen off the bus"


def test_a_flood_is_cut_off() -> None:
    began = time.monotonic()
    assert reason("flood", deadline_s=60.0) == "it wrote more than 1 MiB"
    assert time.monotonic() - began < 30.0


@pytest.mark.parametrize(("said", "why"), [("", "not JSON"), ("{", "not JSON"), ("[1]", "not an object")])
def test_what_is_no_answer_is_said_so(said: str, why: str) -> None:
    assert why in reason("say", said)


def test_a_program_that_is_not_there() -> None:
    answer = ask(["/nonexistent/program"], PROMPT_S)
    assert isinstance(answer, NoAnswer)
    assert "could not be started" in answer.reason


def test_our_secrets_do_not_reach_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FREETOKEN_API_KEY", "sesame")
    assert ask(command("environment"), PROMPT_S) == {"key": ""}
