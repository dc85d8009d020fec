"""Running a child: its lines, its failure, its silence, its end."""

from __future__ import annotations

import sys
import time

import psutil
import pytest

from freetoken.cli.children import ChildFailed, run_child


def python(code: str) -> list[str]:
    return [sys.executable, "-u", "-c", code]


def test_lines_arrive_while_it_runs() -> None:
    lines: list[tuple[str, float]] = []
    run_child(
        python("import time; print('one'); time.sleep(0.5); print('two')"),
        on_line=lambda line: lines.append((line, time.monotonic())),
        stall_s=10,
    )
    assert [line for line, _ in lines] == ["one", "two"]
    assert lines[1][1] - lines[0][1] >= 0.4


def test_a_failure_carries_the_last_words() -> None:
    with pytest.raises(ChildFailed) as caught:
        run_child(python("import sys; print('a\\nerror: no space', file=sys.stderr); sys.exit(3)"), stall_s=10)
    assert str(caught.value) == "exit code 3: no space"


def test_silence_ends_it() -> None:
    pids: list[str] = []
    with pytest.raises(ChildFailed, match=r"no progress for 0 s: stuck"):
        run_child(
            python("import os, sys, time; print(os.getpid()); print('stuck', file=sys.stderr); time.sleep(60)"),
            on_line=pids.append,
            stall_s=0.4,
        )
    assert not psutil.pid_exists(int(pids[0]))


def test_a_mark_that_moves_is_progress() -> None:
    ticks = iter(range(10_000))
    run_child(python("import time; time.sleep(1.2)"), mark=lambda: next(ticks), stall_s=0.5)


def test_a_consumer_that_fails_ends_it() -> None:
    pids: list[int] = []

    def refuse(line: str) -> None:
        pids.append(int(line))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_child(python("import os, time; print(os.getpid()); time.sleep(60)"), on_line=refuse, stall_s=10)
    assert not psutil.pid_exists(pids[0])
