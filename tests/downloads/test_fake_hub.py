"""The fake hub is right as far as huggingface_hub says so: it completes, resumes and rejects against it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.downloads.bench import WEIGHTS, noise
from tests.fakes.hub import Content, FakeHub

PROGRAM = (
    "import sys; from huggingface_hub import snapshot_download as get; print(get(sys.argv[1], revision=sys.argv[2]))"
)


def snapshot(hub: FakeHub, cache: Path, repo: str = "org/m", revision: str = "main") -> tuple[int, str]:
    """(exit code, what it said) of huggingface_hub's own download."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    settings = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(cache),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        **({"HF_TOKEN": "hf_secret"} if hub.token else {}),
    }
    argv = [sys.executable, "-c", PROGRAM, repo, revision]
    done = subprocess.run(argv, env={**environ, **settings}, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout.strip().splitlines()[-1] if done.returncode == 0 else done.stderr


def holds_all(hub: FakeHub, folder: str) -> bool:
    files = hub.repos["org/m"].files
    return all((Path(folder) / name).read_bytes() == b"".join(c.read(0, c.size)) for name, c in files.items())


@pytest.mark.slow
def test_it_completes(hub: FakeHub, tmp_path: Path) -> None:
    code, said = snapshot(hub, tmp_path)
    assert code == 0, said
    assert said.endswith("c" * 40) and holds_all(hub, said)


@pytest.mark.slow
def test_it_resumes_over_a_cut_with_a_range(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos["org/m"].files[WEIGHTS] = Content(noise(1 << 20), 25 << 20, lfs=True)
    hub.faults.only, hub.faults.cuts, hub.faults.cut_after = WEIGHTS, 2, 11 << 20  # it keeps pieces of 10 MiB
    code, said = snapshot(hub, tmp_path)
    assert code == 0 and holds_all(hub, said), said
    ranges = [seen.headers["range"] for seen in hub.requests("cdn") if "range" in seen.headers]
    assert ranges and all(not header.startswith("bytes=0-") for header in ranges)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ({"length": 1000}, "Consistency check failed"),
        ({"length": 0}, "Consistency check failed"),
        ({"statuses": [(404, {"x-error-code": "EntryNotFound"})]}, "404"),
    ],
    ids=["short", "empty", "gone"],
)
def test_it_rejects_a_fault(hub: FakeHub, tmp_path: Path, fault: dict[str, object], named: str) -> None:
    hub.faults.only = WEIGHTS
    for name, value in fault.items():
        setattr(hub.faults, name, value)
    code, said = snapshot(hub, tmp_path)
    assert code != 0 and named in said


@pytest.mark.slow
def test_it_knows_gated_private_absent_and_another_revision(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos["org/m"].gated = True
    assert "GatedRepoError" in snapshot(hub, tmp_path)[1]
    hub.repos["org/m"].gated = False
    assert "RepositoryNotFoundError" in snapshot(hub, tmp_path, "org/none")[1]
    assert "RevisionNotFoundError" in snapshot(hub, tmp_path, revision="v9")[1]
    hub.repos["org/m"].private, hub.token = True, "hf_secret"
    code, said = snapshot(hub, tmp_path)
    assert code == 0 and holds_all(hub, said), said
