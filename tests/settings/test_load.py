"""Four sources, one order, and an error that names the source."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from freetoken.core.errors import SettingError
from freetoken.settings.load import Loaded, home, load, parse_options


def settings(tmp_path: Path, flags: dict[str, object] | None = None, **environ: str) -> Loaded:
    return load(flags, {"FREETOKEN_HOME": str(tmp_path), **environ})


def test_later_sources_win_and_are_remembered(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text(json.dumps({"port": 1, "host": "localhost", "memory_ratio": 0.5}))
    loaded = settings(tmp_path, {"port": "3", "demo": False}, FREETOKEN_PORT="2", FREETOKEN_HOST="127.0.0.2")
    assert (loaded.settings.port, loaded.sources["port"]) == (3, "flag --port")
    assert (loaded.settings.host, loaded.sources["host"]) == ("127.0.0.2", "environment FREETOKEN_HOST")
    assert (loaded.settings.memory_ratio, loaded.sources["memory_ratio"]) == (0.5, "settings.json")
    assert (loaded.settings.load_deadline_s, loaded.sources["load_deadline_s"]) == (600.0, "default")
    assert loaded.given("port") and not loaded.given("demo")
    assert loaded.load_options() == {"memory_ratio": 0.5}


def test_the_home_comes_from_the_environment(tmp_path: Path) -> None:
    loaded = settings(tmp_path)
    assert loaded.settings.home == tmp_path and loaded.sources["home"] == "environment FREETOKEN_HOME"
    assert home({}) == Path("~/.freetoken").expanduser()


@pytest.mark.parametrize(
    ("flags", "environ", "said"),
    [
        ({"port": "70000"}, {}, "flag --port: 70000 is out of range: it must be between 0 and 65535"),
        ({"port": "http"}, {}, "flag --port: 'http' is not a whole number"),
        ({}, {"FREETOKEN_MEMORY_RATIO": "nan"}, "environment FREETOKEN_MEMORY_RATIO: 'nan' is not a finite number"),
        ({"dtype": "int4"}, {}, "flag --dtype: 'int4' is not one of float32, bfloat16"),
        ({}, {"FREETOKEN_DEV_ORIGINS": "maybe"}, "environment FREETOKEN_DEV_ORIGINS: 'maybe' is not yes or no"),
        ({"cors_origins": "localhost"}, {}, "flag --cors-origins: 'localhost' is not an origin"),
        ({"cors_origins": "javascript:alert(1)"}, {}, "flag --cors-origins: 'javascript:alert(1)' is not an origin"),
        ({"prot": "1"}, {}, "'prot' is not a setting (did you mean port?)"),
    ],
)
def test_a_bad_value_names_its_source(
    tmp_path: Path, flags: dict[str, object], environ: dict[str, str], said: str
) -> None:
    with pytest.raises(SettingError) as caught:
        settings(tmp_path, flags, **environ)
    assert caught.value.detail.startswith(said)


@pytest.mark.parametrize("text", ["{", "[1]", '{"prot": 1}', '{"api_key": "x"}', '{"home": "/"}', "\xff"])
def test_a_bad_file_is_an_error_that_says_so(tmp_path: Path, text: str) -> None:
    (tmp_path / "settings.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(SettingError, match=r"settings\.json"):
        settings(tmp_path)


def test_units_and_lists_are_understood(tmp_path: Path) -> None:
    loaded = settings(
        tmp_path, {"cors_origins": "app://obsidian.md, http://localhost:3000/"}, FREETOKEN_LOAD_STALL_S="2min"
    )
    assert loaded.settings.cors_origins == ("app://obsidian.md", "http://localhost:3000")
    assert loaded.settings.load_stall_s == 120.0


def test_the_key_comes_from_the_environment_or_a_file_and_is_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("from-file\n")
    assert settings(tmp_path, {"api_key_file": str(file)}).settings.api_key == "from-file"
    loaded = settings(tmp_path, {"api_key_file": str(file)}, FREETOKEN_API_KEY="from-env")
    assert loaded.settings.api_key == "from-env"
    assert "from-env" not in repr(loaded)
    file.write_text("\n")
    with pytest.raises(SettingError, match="flag --api-key-file: the key file is empty"):
        settings(tmp_path, {"api_key_file": str(file)})


def test_load_options_are_typed_and_take_no_paths_or_strangers() -> None:
    assert parse_options({"max_running_requests": 16, "num_tokens": "4096", "dtype": None}) == {
        "max_running_requests": 16,
        "num_tokens": 4096,
    }
    for name in ("home", "api_key_file", "model", "worker"):
        with pytest.raises(SettingError, match="is not an option of a load"):
            parse_options({name: "/etc/passwd"})
    with pytest.raises(SettingError, match=r"options\.max_running_requests: True is not a whole number"):
        parse_options({"max_running_requests": True})
