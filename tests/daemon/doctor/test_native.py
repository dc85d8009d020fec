"""What the operating system says, out of folders that look like its own."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from freetoken.daemon import native

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


CGROUPS = {
    "v2, the parent is tighter": (
        {
            "proc/self/cgroup": "0::/user.slice/a.service",
            "sys/fs/cgroup/user.slice/memory.max": str(8 * GIB),
            "sys/fs/cgroup/user.slice/a.service/memory.max": str(124 * GIB),
        },
        8 * GIB,
    ),
    "v2, own": (
        {
            "proc/self/cgroup": "0::/a.service",
            "sys/fs/cgroup/memory.max": "max",
            "sys/fs/cgroup/a.service/memory.max": str(GIB),
        },
        GIB,
    ),
    "v2 in a container that sees only itself": (
        {"proc/self/cgroup": "0::/docker/abc", "sys/fs/cgroup/memory.max": str(2 * GIB)},
        2 * GIB,
    ),
    "v2, none": ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": "max"}, None),
    "v1": (
        {"proc/self/cgroup": "5:cpu,memory:/x\n0::/", "sys/fs/cgroup/memory/x/memory.limit_in_bytes": str(3 * GIB)},
        3 * GIB,
    ),
    "v1, its word for no limit": (
        {"proc/self/cgroup": "4:memory:/", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"},
        None,
    ),
    "hybrid": (
        {
            "proc/self/cgroup": "4:memory:/x\n1:name=systemd:/x\n0::/x",
            "sys/fs/cgroup/unified/x/memory.max": str(5 * GIB),
            "sys/fs/cgroup/memory/x/memory.limit_in_bytes": str(4 * GIB),
        },
        4 * GIB,
    ),
    "another system": ({}, None),
}


@pytest.mark.parametrize("name", CGROUPS)
def test_memory_limit(tmp_path: Path, name: str) -> None:
    files, limit = CGROUPS[name]
    assert native.memory_limit(write(tmp_path, files)) == limit


def test_nvidia_devices(tmp_path: Path) -> None:
    assert native.nvidia_devices(tmp_path) is None
    bus = "sys/bus/pci/devices"
    write(tmp_path, {f"{bus}/0000:01:00.0/vendor": "0x10de", f"{bus}/0000:01:00.0/class": "0x030000"})
    write(tmp_path, {f"{bus}/0000:01:00.1/vendor": "0x10de", f"{bus}/0000:01:00.1/class": "0x040300"})  # its sound
    write(tmp_path, {f"{bus}/0000:02:00.0/vendor": "0x1002", f"{bus}/0000:02:00.0/class": "0x030000"})
    assert native.nvidia_devices(tmp_path) == 1


def test_wsl_is_told_by_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("platform.release", lambda: "6.6.87.2-microsoft-standard-WSL2")
    assert native.system_name() == "WSL"
    monkeypatch.setattr("platform.release", lambda: "6.8.0-41-generic")
    assert native.system_name() == "Linux"


def test_native_windows_is_not_taken_for_uncapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """FT #120: only WSL's kernel name was known, so Windows counted as without a limit."""
    monkeypatch.setattr("sys.platform", "win32")
    assert native.system_name() == "Windows"


def test_this_machine() -> None:
    limit = native.memory_limit()
    assert limit is None or limit > 0
    assert native.is_mine(Path(__file__)) == (Path(__file__).stat().st_uid == psutil.Process().uids().effective)
    features = native.cpu_features()
    assert features is None or len(features) > 0
    commit = native.commit_limit()
    assert commit is None or commit.free <= commit.limit
