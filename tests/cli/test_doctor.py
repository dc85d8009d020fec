"""`ft doctor` as people and scripts run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from freetoken.daemon.doctor import examine as examination
from freetoken.daemon.doctor.table import CHECKS
from freetoken.daemon.store import Home, open_home
from freetoken.daemon.watch.probe import probe_gpus
from tests.cli.conftest import Ft
from tests.fakes.gpus import H200, LOST, document
from tests.fakes.probe_child import command

BLOCKED = """
import sys
from importlib.abc import MetaPathFinder
class Blocker(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "triton", "numpy", "transformers"):
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Blocker())
from freetoken.cli.main import main
sys.exit(main(["doctor", "--json"]))
"""


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make the driver say a document, by way of a real child."""

    def use(*documents: dict[str, Any]) -> None:
        program = command("say", json.dumps(document(*documents)))
        monkeypatch.setattr(examination, "probe_gpus", lambda: probe_gpus(program))

    return use


def test_without_a_daemon_and_with_torch_blocked(home: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", BLOCKED],
        env={**os.environ, "FREETOKEN_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    found = json.loads(ran.stdout)
    assert [check["id"] for check in found["checks"]] == [check.id for check in CHECKS]
    assert ran.returncode == (1 if found["summary"]["fail"] else 0), ran.stderr
    assert next(check for check in found["checks"] if check["id"] == "torch")["status"] == "pass"
    assert not [c for c in found["checks"] if "blocked" in c["detail"] or "The check itself failed" in c["detail"]]
    assert not home.exists()


def test_failures_come_first_with_their_fix(ft: Ft, home: Path, cards: Any) -> None:
    cards(H200, LOST)
    open_home(home)
    home.chmod(0o755)
    ran = ft("doctor")
    lines = ran.out.splitlines()
    assert ran.code == 1
    assert lines[0].split()[:3] == ["fail", "NVIDIA", "driver"] and "GPU is lost" in lines[0]
    assert lines[1].strip() == "fix: Restart the computer"
    statuses = [line.split()[0] for line in lines[:-1] if not line.startswith(" ")]
    order = ["fail", "warn", "inconclusive", "pass", "skipped"]
    assert statuses == sorted(statuses, key=order.index)
    assert any("0755 instead of 0700" in line for line in lines)
    assert f"{statuses.count('fail')} fail" in lines[-1]
    assert "\x1b" not in ran.out, "no colour where nobody sees it"


def test_fix_repairs_and_says_so(ft: Ft, home: Path, cards: Any) -> None:
    cards(H200)
    open_home(home)
    home.chmod(0o755)
    Home(home).daemon_record.write_text("{")
    before = ft("doctor", "--json").json
    assert {c["id"]: c["status"] for c in before["checks"]}["folder"] == "fail"
    assert before["fixed"] == []
    after = ft("doctor", "--fix", "--json").json
    assert [word in " ".join(after["fixed"]) for word in ("0755 is now 0700", "daemon.json")] == [True, True]
    statuses = {check["id"]: check["status"] for check in after["checks"]}
    assert (statuses["folder"], statuses["record"]) == ("pass", "pass")
    assert home.stat().st_mode & 0o777 == 0o700
    assert ft("doctor", "--fix", "--json").json["fixed"] == []


def test_json_has_fixes_and_evidence(ft: Ft, home: Path, cards: Any) -> None:
    cards(LOST)
    driver = ft("doctor", "--json").json["checks"][0]
    assert driver["fixes"] == [{"id": "driver.0", "title": "Restart the computer"}]
    assert driver["evidence"]["driver"] == "580.159.04"


def test_a_driver_that_hangs_is_inconclusive(ft: Ft, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "probe_gpus", lambda: probe_gpus(command("hang"), deadline_s=0.3))
    found = {check["id"]: check for check in ft("doctor", "--json").json["checks"]}
    for id in ("driver", "vram", "capability"):
        assert found[id]["status"] == "inconclusive"
        assert "no answer within 0.3 s" in found[id]["detail"]


def test_a_setting_that_cannot_be_read_is_a_usage_error(ft: Ft, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FREETOKEN_PORT", "many")
    assert ft("doctor").code == 2
