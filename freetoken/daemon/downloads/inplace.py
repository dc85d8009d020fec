"""Models that other programs keep on this machine: Hugging Face's cache and LM Studio's folders. Reads only.

Hugging Face's layout (huggingface_hub, "Understand caching"): models--<org>--<name>/refs/<branch> names a commit,
snapshots/<commit>/ holds links into blobs/; a link exists once its file is whole. LM Studio's: <publisher>/<name>/ with
the files themselves. A row is given only where every file that a load needs is there, and inside that program's folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from freetoken.catalog.safetensors import INDEX
from freetoken.core.errors import ConfigMissing, FreeTokenError
from freetoken.daemon import store
from freetoken.daemon.downloads.choose import RepoFile, choose, has_folder_model, has_index, variants
from freetoken.daemon.downloads.names import ModelName, checked_commit
from freetoken.daemon.shelf import Shelved

_PREFIX = "models--"
_MOST_FILES = 10_000  # looked at in one folder


def hub_cache(environ: Mapping[str, str] = os.environ) -> Path:
    """Where Hugging Face's tools keep models (their own variables)."""
    if "HF_HUB_CACHE" in environ:
        return Path(environ["HF_HUB_CACHE"]).expanduser()
    return Path(environ.get("HF_HOME", "~/.cache/huggingface")).expanduser() / "hub"


def lm_studio_folders() -> list[Path]:
    """Where LM Studio keeps models, now and in earlier versions."""
    return [Path(place).expanduser() for place in ("~/.lmstudio/models", "~/.cache/lm-studio/models")]


def hub_cache_models(cache: Path) -> list[Shelved]:
    """The complete models of a Hugging Face cache, by id."""
    rows: list[Shelved] = []
    for repo in _folders(cache):
        org, dashes, name = repo.name.removeprefix(_PREFIX).partition("--")
        if repo.name.startswith(_PREFIX) and dashes:
            try:
                rows += _models(f"{org}/{name}", snapshot(repo), repo)
            except FreeTokenError:  # partial, or nothing that can be loaded: not a row
                continue
    return sorted(rows, key=lambda row: row.id)


def lm_studio_models(root: Path) -> list[Shelved]:
    """The complete models of one LM Studio folder, by id."""
    rows: list[Shelved] = []
    for publisher in _folders(root):
        for folder in _folders(publisher):
            try:
                rows += _models(f"{publisher.name}/{folder.name}", folder, root)
            except FreeTokenError:  # as above
                continue
    return sorted(rows, key=lambda row: row.id)


def snapshot(repo: Path) -> Path:
    """The folder to load for a repository of Hugging Face's cache: what refs/main names where it is complete, else the
    newest complete snapshot. Raises ConfigMissing where there is none."""
    snapshots = _folders(repo / "snapshots")
    main = _main(repo)
    found = sorted(snapshots, key=lambda folder: (folder.name == main, folder.stat().st_mtime), reverse=True)
    for folder in found:
        try:
            if _models("org/name", folder, repo):
                return folder
        except FreeTokenError:  # another snapshot may do
            continue
    raise ConfigMissing(
        f"{repo.name} is a folder of Hugging Face's cache with {len(found)} snapshots, none of them complete.",
        numbers={"snapshots": len(found)},
        fixes=("download the model again", "give the folder of a complete snapshot: snapshots/<commit>"),
    )


def is_cached_repo(path: Path) -> bool:
    """Whether `path` is a repository's folder in Hugging Face's cache, not a model's."""
    return path.name.startswith(_PREFIX) and (path / "snapshots").is_dir()


def _main(repo: Path) -> str | None:
    try:
        return checked_commit((repo / "refs" / "main").read_text("ascii").strip())
    except (OSError, ValueError, FreeTokenError):  # no branch is kept there, or not by those tools
        return None


def _models(name: str, folder: Path, root: Path) -> Iterable[Shelved]:
    """The rows of one folder. Raises what choose raises, UnsafeName."""
    files = list(_files(folder, root))
    created = int(folder.stat().st_mtime)
    rows = []
    if has_folder_model(files):
        choose(files, None, _shards(folder) if has_index(files) else None)
        rows.append(Shelved(str(ModelName.parse(name)), folder, created))
    for label, parts in variants(files).items():
        choose(files, label)
        rows.append(Shelved(str(ModelName.parse(f"{name}:{label}")), folder / parts[0].name, created))
    return rows


def _files(folder: Path, root: Path) -> Iterator[RepoFile]:
    """The files of a model's folder whose content is there, and below `root` after every link."""
    below = root.resolve()
    for count, path in enumerate(folder.rglob("*")):
        if count >= _MOST_FILES:
            return
        target = path.resolve()
        if target.is_file() and target.is_relative_to(below):
            yield RepoFile(path.relative_to(folder).as_posix(), target.stat().st_size)


def _shards(folder: Path) -> list[str]:
    index = store.read_json(folder / INDEX)
    try:
        return list(msgspec.convert(index, _Index).weight_map.values())
    except msgspec.ValidationError:
        return []  # choose refuses an index that names no file


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _folders(path: Path) -> list[Path]:
    try:
        return sorted(child for child in path.iterdir() if child.is_dir())
    except OSError:  # not there, or not ours to read: no models
        return []
