"""The state folder: ours or untouched, private, never half-written."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from freetoken.core.errors import HomeNotOurs
from freetoken.daemon import store


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_home_is_private_and_marked(tmp_path: Path) -> None:
    home = store.open_home(tmp_path / "new" / "home")
    assert json.loads((home.root / "freetoken-home.json").read_text()) == {"layout": 1}
    token = store.read_or_make_token(home)
    assert len(bytes.fromhex(token)) == 32
    assert store.read_or_make_token(store.open_home(home.root)) == token
    assert mode(home.root) == 0o700 and mode(home.token_file) == 0o600 and mode(home.lock.parent) == 0o700


def test_an_empty_folder_is_taken_and_a_too_short_token_replaced(tmp_path: Path) -> None:
    home = store.open_home(tmp_path)
    home.token_file.write_text("\n")
    home.token_file.chmod(0o644)
    assert len(store.read_or_make_token(home)) == 64
    assert mode(home.token_file) == 0o600


@pytest.mark.parametrize("mark", [None, '{"layout": 2}'])
def test_a_foreign_folder_is_refused_and_left_as_it_was(tmp_path: Path, mark: str | None) -> None:
    (tmp_path / "config.yaml").write_text("theirs")
    if mark:
        (tmp_path / store.MARK).write_text(mark)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(HomeNotOurs) as caught:
        store.open_home(tmp_path)
    assert str(tmp_path) in caught.value.detail and caught.value.fixes
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    store.write_json(path, [1])
    with pytest.raises(TypeError):
        store.write_json(path, [object()])
    assert store.read_json(path) == [1] and mode(path) == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_a_file_that_is_not_json_reads_as_absent(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b"\x00\x00")
    assert store.read_json(tmp_path / "x.json") is None
    assert store.read_json(tmp_path / "y.json") is None
