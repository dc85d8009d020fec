"""The command itself: quick, typed errors as exit codes, verbs that a person can find."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from freetoken import __version__
from freetoken.cli.foreign import REPLACED
from freetoken.cli.main import VERBS
from freetoken.core.errors import DaemonNotReachable
from tests.cli.conftest import Ft
from tests.fakes.control import Control, problem, write_record

FT = [sys.executable, "-c", "from freetoken.cli.main import run; run()"]


def test_version_is_quick_and_imports_little() -> None:
    """The best of five stays under 0.2 s, without torch, typer or an HTTP client."""
    took = []
    for _ in range(5):
        began = time.perf_counter()
        ran = subprocess.run([*FT, "--version"], capture_output=True, text=True, check=True)
        took.append(time.perf_counter() - began)
    assert ran.stdout == f"FreeToken {__version__}\n"
    assert min(took) <= 0.2
    code = "import sys; from freetoken.cli.main import main; main(['--version']); print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "typer", "httpx", "rich", "psutil"} & set(modules)


def test_help_names_every_verb(ft: Ft) -> None:
    ran = ft("--help")
    assert ran.code == 0
    assert all(f"  {verb} " in ran.out for verb in VERBS)
    assert ft().out == ran.out


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_takes_json_and_explains_itself(ft: Ft, verb: str) -> None:
    pages = (
        [ft(verb, sub, "--help") for sub in ("start", "stop", "status")] if verb == "daemon" else [ft(verb, "--help")]
    )
    assert all(page.code == 0 and "--json" in page.out for page in pages)


@pytest.mark.parametrize("args", [["lod"], ["load"], ["load", "demo", "--nope"], ["chat", "--temperature", "hot"]])
def test_usage_errors_end_with_2(ft: Ft, args: list[str]) -> None:
    ran = ft(*args)
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err


def test_a_bad_knob_is_named_before_anything_is_asked(ft: Ft, server: Control) -> None:
    ran = ft("load", "demo", "--num-pages", "many")
    assert ran.code == 2
    assert ran.err.startswith("error: flag --num-pages: 'many'")
    assert not server.seen


@pytest.mark.parametrize("verb", [["status"], ["load", "demo"], ["unload"], ["chat", "--ask", "hi"]])
def test_without_a_daemon_the_exit_code_is_3_and_the_remedy_is_said(ft: Ft, verb: list[str]) -> None:
    ran = ft(*verb)
    assert ran.code == 3
    assert ran.err.splitlines()[0].startswith("error: no daemon runs for ")
    assert ran.err.splitlines()[1] == "  fix: ft daemon start"
    assert ran.out == ""


def test_json_errors_are_one_object_on_stdout(ft: Ft) -> None:
    ran = ft("status", "--json")
    assert ran.code == 3
    assert ran.json["error"]["code"] == DaemonNotReachable.code
    assert ran.json["error"]["fixes"] == ["ft daemon start"]


def test_a_refused_token_is_4(ft: Ft, home: object, server: Control) -> None:
    write_record(home, server.url)  # type: ignore[arg-type]
    (home / "token").write_text("old")  # type: ignore[operator]
    assert ft("status").code == 4


@pytest.mark.parametrize(
    ("code", "exit_code"), [("DOES_NOT_FIT", 6), ("ENGINE_DIED", 7), ("ORIGIN_REFUSED", 5), ("LOAD_TIMEOUT", 8)]
)
def test_exit_codes_follow_the_error(ft: Ft, server: Control, code: str, exit_code: int) -> None:
    server.load_status, server.load_answer = 409, problem(code, "because \x1b[31m of this")
    ran = ft("load", "demo")
    assert ran.code == exit_code
    assert ran.err.splitlines()[0] == r"error: because \x1b[31m of this", "control characters are shown, not sent"


@pytest.mark.parametrize("flag", REPLACED)
def test_flags_of_the_public_freetoken_are_answered_with_what_replaces_them(ft: Ft, flag: str) -> None:
    ran = ft("serve", "--demo", flag, "1")
    assert ran.code == 2
    assert ran.err.splitlines() == [f"error: {flag} is not taken here", f"  fix: {REPLACED[flag]}"]


@pytest.mark.parametrize("args", [["--nope"], ["demo"], ["--api-kee=secret"]])
def test_serve_takes_nothing_it_does_not_know(ft: Ft, args: list[str]) -> None:
    ran = ft("serve", *args)
    assert ran.code == 2
    assert "ft serve --help" in ran.err


def test_a_replaced_flag_is_not_one_of_ours() -> None:
    from freetoken.cli.flags import knobs

    ours = {knob.flag for knob in knobs("start", "daemon", "load")}
    assert not ours & set(REPLACED)
    assert "--api-key-file" in ours
