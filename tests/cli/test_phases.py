"""How work in phases is shown: lines in a file, a bar on a terminal, nothing when asked for JSON."""

from __future__ import annotations

import io

import pytest

from freetoken.cli import phases


def play(display: phases.Phases) -> None:
    display.update("read_weights", 0, 2048, "bytes")
    display.update("read_weights", 1024, 2048, "bytes")
    display.update("warmup", 0, 1, "steps")
    display.update("warmup", 1, 1, "steps")


def test_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "LINE_EVERY_S", 0.0)
    with phases.shown() as display:
        play(display)
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert lines[0] == "  read weights: 1.00 KiB of 2.00 KiB"
    assert [line.split(" in ")[0] for line in lines[1:]] == [
        "  read weights: done",
        "  warmup: for 0 ms",
        "  warmup: done",
    ]


def test_a_phase_that_fails_is_not_called_done(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError), phases.shown() as display:
        display.update("warmup")
        raise ValueError
    assert capsys.readouterr().err == ""


def test_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    with phases.shown(quiet=True) as display:
        play(display)
    assert capsys.readouterr() == ("", "")


def test_bars_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    with phases.shown() as display:
        play(display)
    assert "read weights" in terminal.getvalue()
    assert "1.00 KiB / 2.00 KiB" in terminal.getvalue()
    assert "✓" in terminal.getvalue()


@pytest.mark.parametrize(
    ("value", "unit", "text"), [(2048, "bytes", "2.00 KiB"), (1234, "layers", "1,234 layers"), (5, "", "5")]
)
def test_amounts(value: int, unit: str, text: str) -> None:
    assert phases.amount(value, unit) == text
