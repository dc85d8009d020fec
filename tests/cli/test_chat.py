"""`ft chat` against a scripted server: one question, a conversation, errors and Ctrl-C."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from freetoken.cli.chat import Answer
from tests.cli.conftest import Ft
from tests.fakes.control import Control


def requests(server: Control) -> list[dict[str, object]]:
    return [body for _, path, body in server.seen if path == "/v1/chat/completions"]


def test_one_question(ft: Ft, server: Control) -> None:
    server.say("Par", "is", ".", usage={"prompt_tokens": 5, "completion_tokens": 3})
    ran = ft("chat", "--ask", "Capital of France?", "--temperature", "0", "--system", "Be short.")
    assert ran.code == 0
    assert ran.out == "Paris.\n"
    assert ran.err.startswith("3 tokens")
    assert "first token" in ran.err
    (body,) = requests(server)
    assert body["model"] == "demo"
    assert body["temperature"] == 0
    assert "seed" not in body
    assert body["messages"] == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Capital of France?"},
    ]


def test_piped_text_is_one_question(ft: Ft, server: Control) -> None:
    server.say("ok")
    assert ft("chat", stdin="two\nlines\n").out == "ok\n"
    assert requests(server)[0]["messages"] == [{"role": "user", "content": "two\nlines"}]
    assert ft("chat", stdin="\n").code == 2


def test_json_is_one_object(ft: Ft, server: Control) -> None:
    server.say("Pa", "ris")
    ran = ft("chat", "--ask", "?", "--json")
    assert ran.json["answer"] == "Paris"
    assert ran.json["tokens"] == 2
    assert ran.json["first_token_ms"] >= 0
    assert ran.err == ""


def test_counts_are_measured_from_the_first_token(ft: Ft, server: Control) -> None:
    server.say("a", "b", usage={"prompt_tokens": 1, "completion_tokens": 11})
    server.chat.insert(1, 0.3)  # before the first token
    server.chat.insert(3, 0.5)  # between the two
    facts = ft("chat", "--ask", "?", "--json").json
    assert 300 <= facts["first_token_ms"] < 700
    assert 12 < facts["tok_s"] <= 20  # 10 tokens in 0.5 s and a little


def test_no_division_by_nothing() -> None:
    assert Answer(tokens=1, first=1.0, last=1.0).tok_s is None
    assert Answer(tokens=5, first=1.0, last=1.0).tok_s is None
    assert Answer(tokens=5, first=1.0, last=3.0).tok_s == 2.0


def test_no_model(ft: Ft, server: Control) -> None:
    server.engine = {"state": "stopped", "model": None}
    ran = ft("chat", "--ask", "?")
    assert ran.code == 1
    assert "fix: ft load MODEL" in ran.err


def test_an_error_in_mid_answer(ft: Ft, server: Control) -> None:
    died = {"error": {"message": "the engine was killed", "freetoken_code": "ENGINE_DIED", "fixes": []}}
    server.chat = [{"choices": [{"delta": {"content": "Pa"}}]}, died, None]
    ran = ft("chat", "--ask", "?")
    assert ran.code == 7
    assert "error: the engine was killed" in ran.err


def test_control_characters_of_an_answer_do_not_reach_the_terminal(ft: Ft, server: Control) -> None:
    server.say("a\x1b[2Jb\nc\té🙂")
    assert ft("chat", "--ask", "?").out == "a[2Jb\nc\té🙂\n"


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines that a person types at the prompt; then the end of input."""
    lines: list[str] = []
    stream: Iterator[str] = iter(lines)

    def read(prompt: str = "") -> str:
        try:
            return next(stream)
        except StopIteration:
            raise EOFError from None

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(io, "StringIO", Terminal)  # conftest's stand-in for stdin becomes a terminal
    return lines


def test_a_conversation_remembers_and_forgets(ft: Ft, server: Control, typed: list[str]) -> None:
    server.say("yes")
    typed += ["one", "", "two", "/reset", "three", "/bogus", "/exit", "four"]
    ran = ft("chat")
    assert ran.code == 0
    assert "/bogus is not a command" in ran.err
    histories = [[message["content"] for message in body["messages"]] for body in requests(server)]  # type: ignore[attr-defined]
    assert histories == [["one"], ["one", "yes", "two"], ["three"]]


def test_an_error_ends_the_answer_and_not_the_conversation(ft: Ft, server: Control, typed: list[str]) -> None:
    server.chat_status = 503
    server.chat = [{"error": {"message": "busy", "freetoken_code": "QUEUE_FULL"}}]
    typed += ["one", "two"]
    ran = ft("chat")
    assert ran.code == 0
    assert ran.err.count("error: busy") == 2
    assert requests(server)[1]["messages"] == [{"role": "user", "content": "two"}], "the unanswered question is gone"


@pytest.mark.skipif(sys.platform == "win32", reason="SIGINT to one process is POSIX")
def test_ctrl_c_stops_the_answer_and_hangs_up(server: Control, home: Path) -> None:
    server.chat = [{"choices": [{"delta": {"content": "Pa"}}]}]
    child = subprocess.Popen(
        [sys.executable, "-c", "from freetoken.cli.main import run; run()", "chat", "--ask", "?"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout
    assert child.stdout.read(2) == "Pa"
    time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=10)
    assert child.returncode == 130
    assert err.startswith("stopped")
    assert server.hung_up.wait(5)
