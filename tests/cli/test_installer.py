"""installers/linux/install.sh with stand-ins for python3, pip and ft: what it refuses, moves, makes and says.

The stand-ins write down what was asked of them; the real packages are installed by the tests of tests/e2e.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the installer is for Linux")

SCRIPT = Path(__file__).parents[2] / "installers" / "linux" / "install.sh"

# A Python that can only do what the installer asks: tell its version, make an environment, run pip there.
PYTHON = """#!/bin/sh
echo "python $*" >>"$LOG"
case "$*" in
    *"sys.version_info < (3, 11) or sys.prefix"*) exit 0 ;;
    *"sys.version_info < (3, 11)"*) exit "${OLD:-0}" ;;
    *version_info*) echo 3.11 ;;
    *"import venv"*) exit "${NO_VENV:-0}" ;;
    *"-m venv"*)
        for last; do :; done
        mkdir -p "$last/bin" && cp "$0" "$last/bin/python" && echo made >"$last/marker"
        ;;
    *"pip install"*)
        case "${PIP:-good} $*" in
            "broken "* | "cache "*" --upgrade-strategy only-if-needed /"*) echo "hashes do not match" >&2; exit 1 ;;
        esac
        cp "$HOME/ft" "$(dirname "$0")/ft"
        ;;
esac
"""
FT = """#!/bin/sh
echo "ft $*" >>"$LOG"
case "$1 $2" in
    "--version "*) echo "FreeToken 0.1.0" ;;
    "daemon status") exit "${DAEMON:-3}" ;;
    "load demo") exit "${LOAD:-0}" ;;
esac
"""


@dataclass
class Machine:
    """A home folder with a fake python3 first on the PATH."""

    root: Path

    @property
    def home(self) -> Path:
        return self.root / "user"

    @property
    def state(self) -> Path:
        return self.home / ".freetoken"

    @property
    def link(self) -> Path:
        return self.home / ".local" / "bin" / "ft"

    def install(self, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
        (self.root / "log").unlink(missing_ok=True)
        environment = {
            "HOME": str(self.home),
            "PATH": f"{self.root}/bin:/usr/bin:/bin",
            "LOG": str(self.root / "log"),
            **variables,
        }
        return subprocess.run(
            ["sh", str(SCRIPT), *args],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
            cwd=self.root,
        )

    def asked(self) -> list[str]:
        return (self.root / "log").read_text().splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    for place, text in (("bin/python3", PYTHON), ("user/ft", FT)):
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    return Machine(tmp_path)


def test_an_install_makes_home_environment_and_link(machine: Machine) -> None:
    ran = machine.install()
    assert ran.returncode == 0, ran.stderr
    assert json.loads((machine.state / "freetoken-home.json").read_text()) == {"layout": 1}
    assert machine.state.stat().st_mode & 0o777 == 0o700
    assert machine.link.readlink() == machine.state / "venv" / "bin" / "ft"
    (pip,) = [line for line in machine.asked() if "pip install" in line]
    assert pip.endswith(str(SCRIPT.parents[2]))
    assert "-e" not in pip.split()
    assert not any(line.startswith("ft daemon start") for line in machine.asked()), "it only installs"


def test_a_second_run_keeps_what_is_whole(machine: Machine) -> None:
    machine.install()
    (machine.state / "venv" / "marker").write_text("kept")
    (machine.state / "models").mkdir()
    ran = machine.install()
    assert ran.returncode == 0, ran.stderr
    assert (machine.state / "venv" / "marker").read_text() == "kept"
    assert sorted(path.name for path in machine.state.iterdir()) == ["freetoken-home.json", "models", "venv"]


def test_a_broken_environment_is_moved_aside_and_rebuilt(machine: Machine) -> None:
    machine.install()
    python = machine.state / "venv" / "bin" / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    ran = machine.install()
    assert ran.returncode == 0, ran.stderr
    assert "broken" in ran.stdout
    assert len(list(machine.state.glob("venv.broken-*"))) == 1
    assert python.read_text() == PYTHON


def test_a_folder_of_another_program_is_not_written_into(machine: Machine) -> None:
    machine.state.mkdir()
    (machine.state / "engine.db").write_text("theirs")
    ran = machine.install()
    assert ran.returncode == 2
    assert "engine.db" in ran.stderr
    assert "--replace" in ran.stderr
    assert "FREETOKEN_HOME=" in ran.stderr
    assert [path.name for path in machine.state.iterdir()] == ["engine.db"]
    assert machine.install("--replace").returncode == 0
    (moved,) = machine.home.glob(".freetoken.replaced-*")
    assert (moved / "engine.db").read_text() == "theirs"


def test_replace_leaves_our_own_folder_alone(machine: Machine) -> None:
    machine.install()
    (machine.state / "models").mkdir()
    assert machine.install("--replace").returncode == 0
    assert (machine.state / "models").is_dir()


def test_another_home(machine: Machine) -> None:
    ran = machine.install(FREETOKEN_HOME="elsewhere")
    assert ran.returncode == 0, ran.stderr
    assert (machine.root / "elsewhere" / "venv" / "bin" / "python").exists()
    assert not machine.state.exists()
    assert f"export FREETOKEN_HOME='{machine.root}/elsewhere'" in ran.stdout


def test_a_foreign_ft_is_not_overwritten(machine: Machine) -> None:
    machine.link.parent.mkdir(parents=True)
    machine.link.write_text("theirs")
    ran = machine.install()
    assert ran.returncode == 0
    assert machine.link.read_text() == "theirs"
    assert "belongs to another program" in ran.stdout
    assert str(machine.state / "venv" / "bin" / "ft") in ran.stdout


@pytest.mark.parametrize(
    ("variables", "words"), [({"OLD": "1"}, ["3.11 or newer"]), ({"NO_VENV": "1"}, ["no venv", "python3.11-venv"])]
)
def test_a_python_that_cannot_is_answered_with_the_package_to_install(
    machine: Machine, variables: dict[str, str], words: list[str]
) -> None:
    # `/usr/bin` may hold a good Python: only the stand-in is on this PATH.
    tools = machine.root / "tools"
    tools.mkdir()
    for name in ("sh", "dirname", "grep", "date", "sed", "ls", "head", "tr", "mkdir", "cat"):
        (tools / name).symlink_to(shutil.which(name) or os.fspath(name))
    ran = machine.install(PATH=f"{machine.root}/bin:{tools}", **variables)
    assert ran.returncode == 1
    assert all(word in ran.stderr for word in words)
    assert "fix: sudo apt-get install python3" in ran.stderr
    assert not machine.state.exists(), "nothing was begun"


def test_pip_gets_one_more_try_without_its_cache(machine: Machine) -> None:
    ran = machine.install(PIP="cache")
    assert ran.returncode == 0, ran.stderr
    tries = [line for line in machine.asked() if "pip install" in line]
    assert ["--no-cache-dir" in line for line in tries] == [False, True]


def test_a_pip_that_fails_twice_ends_it_with_causes(machine: Machine) -> None:
    ran = machine.install(PIP="broken")
    assert ran.returncode == 1
    assert "hashes do not match" in ran.stderr
    assert ran.stderr.count("  fix: ") >= 4


def test_a_running_daemon_is_stopped_before_its_environment_changes(machine: Machine) -> None:
    machine.install()
    assert machine.install(DAEMON="0").returncode == 0
    asked = machine.asked()
    stop = asked.index("ft daemon stop")
    assert stop < next(i for i, line in enumerate(asked) if "pip install" in line)


def test_the_demo_is_started_pulled_loaded_and_asked(machine: Machine) -> None:
    ran = machine.install("--demo", "--ask", "What is it?")
    assert ran.returncode == 0, ran.stderr
    after = [line for line in machine.asked() if line.startswith("ft ") and "--version" not in line]
    assert after == [
        "ft daemon start",
        "ft pull demo",
        "ft load demo",
        "ft chat --model demo --temperature 0 --max-tokens 256 --ask What is it?",
        "ft status",
    ]


def test_a_demo_step_that_fails_ends_it_with_its_exit_code(machine: Machine) -> None:
    assert machine.install("--demo", "--ask", "?", LOAD="6").returncode == 6
    assert not any("chat" in line for line in machine.asked())


def test_without_a_terminal_and_a_question_no_chat_is_opened(machine: Machine) -> None:
    assert machine.install("--demo").returncode == 0
    assert not any("chat" in line for line in machine.asked())


@pytest.mark.parametrize("args", [["--nope"], ["--ask"], ["--demo", "--ask", ""], ["--ask", "x"]])
def test_usage(machine: Machine, args: list[str]) -> None:
    ran = machine.install(*args)
    assert ran.returncode == 2
    assert ran.stderr.startswith("error: ")
    assert not machine.state.exists()


def test_help(machine: Machine) -> None:
    ran = machine.install("--help")
    assert ran.returncode == 0
    assert "--replace" in ran.stdout
