"""Files arrive whole and right over everything that a server, a network and a disk do; or not at all."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import time
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from freetoken.core.errors import (
    DiskFull,
    DownloadHostRefused,
    DownloadStalled,
    FileChanged,
    FreeTokenError,
    HashMismatch,
    HubUnavailable,
    RepoGated,
)
from freetoken.daemon.downloads.placing import check_room
from tests.downloads.bench import SMALL, WEIGHTS, Counted, Transfer, noise
from tests.fakes.hub import Content, Faults


def ranges(transfer: Transfer) -> list[str]:
    return [seen.headers["range"] for seen in transfer.hub.requests("cdn") if "range" in seen.headers]


def nothing_is_there(transfer: Transfer) -> bool:
    return not (transfer.folder / "files" / WEIGHTS).exists()


def test_all_files_arrive_in_parts_and_are_counted(transfer: Transfer) -> None:
    digests = transfer.run()
    files = transfer.hub.repos["org/m"].files
    assert digests == {name: content.sha256 for name, content in files.items()}
    assert all(transfer.right(name) for name in files)
    total = sum(content.size for content in files.values())
    assert (transfer.report.came, transfer.report.verified) == (total, total)
    assert len(ranges(transfer)) == -(-files[WEIGHTS].size // SMALL.part_bytes)


def test_a_connection_that_is_cut_goes_on_where_it_was(transfer: Transfer) -> None:
    transfer.hub.faults = Faults(only=WEIGHTS, cuts=20, cut_after=100_000)
    transfer.run(WEIGHTS)
    assert transfer.right()
    starts = [int(header.removeprefix("bytes=").split("-")[0]) for header in ranges(transfer)]
    assert any(start % SMALL.part_bytes for start in starts)
    asked = [seen for seen in transfer.hub.requests("cdn") if seen.headers.get("if-range")]
    assert asked and all(seen.status == 206 for seen in asked)


def test_cuts_that_bring_nothing_end_it_in_bounded_time(transfer: Transfer) -> None:
    transfer.hub.faults = Faults(only=WEIGHTS, cuts=10**6, cut_after=0)
    with pytest.raises(HubUnavailable):
        transfer.run(WEIGHTS)
    assert len(transfer.hub.requests("cdn")) <= SMALL.connections * transfer.patience.attempts
    assert nothing_is_there(transfer)


def test_the_whole_in_answer_to_a_range_restarts_and_is_never_appended(transfer: Transfer) -> None:
    transfer.hub.faults = Faults(only=WEIGHTS, cuts=6, cut_after=100_000)
    asyncio.run(stopped_early(transfer))
    transfer.hub.faults = Faults(only=WEIGHTS, ignore_range=True)
    transfer.run(WEIGHTS)
    assert transfer.right()


async def stopped_early(transfer: Transfer) -> None:
    """Cancelled once something has arrived."""
    task = asyncio.create_task(transfer.fetch(WEIGHTS))
    while transfer.report.came < 300_000:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_server_that_knows_no_ranges_and_cuts_is_given_up(transfer: Transfer) -> None:
    transfer.hub.faults = Faults(only=WEIGHTS, ignore_range=True, cuts=10**6, cut_after=100_000)
    with pytest.raises(HubUnavailable, match="only the whole file"):
        transfer.run(WEIGHTS)
    assert nothing_is_there(transfer)


def test_range_not_satisfiable_checks_the_size_again(transfer: Transfer) -> None:
    transfer.hub.faults = Faults(only=WEIGHTS, not_satisfiable=1)
    transfer.run(WEIGHTS)
    assert transfer.right()


def test_another_size_than_announced_is_a_changed_file(transfer: Transfer) -> None:
    content = transfer.hub.repos["org/m"].files[WEIGHTS]
    content.size += 1  # the listing was made before: only the server's answers change
    transfer.hub.faults.listing = lambda rows: [
        row | {"lfs": smaller(row["lfs"])} if "lfs" in row else row for row in rows
    ]
    with pytest.raises(FileChanged):
        transfer.run(WEIGHTS)
    assert nothing_is_there(transfer)


def smaller(lfs: dict[str, object]) -> dict[str, object]:
    return {**lfs, "size": int(str(lfs["size"])) - 1}


def test_wrong_bytes_are_dropped_and_fetched_once_more(transfer: Transfer) -> None:
    transfer.run("config.json")
    transfer.hub.faults = Faults(only=WEIGHTS, wrong_bytes=1)
    transfer.run()
    assert transfer.right() and transfer.right("config.json")
    assert len([seen for seen in transfer.hub.requests("hub") if seen.path.endswith("/config.json")]) == 1


def test_wrong_bytes_twice_are_an_error_that_names_the_likely_cause(transfer: Transfer) -> None:
    transfer.hub.faults = Faults(only=WEIGHTS, wrong_bytes=10**6)
    with pytest.raises(HashMismatch, match=r"wrong content.*a proxy, a cache or a mirror"):
        transfer.run(WEIGHTS)
    assert nothing_is_there(transfer)
    assert transfer.report.came == 0 and transfer.report.verified == 0


def test_wrong_bytes_of_a_small_file_are_found_by_its_git_id(transfer: Transfer) -> None:
    transfer.hub.faults = Faults(only="tokenizer.json", wrong_bytes=10**6)
    with pytest.raises(HashMismatch):
        transfer.run("tokenizer.json")


@pytest.mark.parametrize("length", [0, 1000])
def test_a_wrong_length_is_said_with_both_numbers(transfer: Transfer, length: int) -> None:
    transfer.hub.faults = Faults(only="tokenizer.json", length=length)
    with pytest.raises(HubUnavailable, match=f"{length} of [0-9]+ bytes"):
        transfer.run("tokenizer.json")
    assert not (transfer.folder / "files" / "tokenizer.json").exists()


def test_retry_after_is_honoured(transfer: Transfer) -> None:
    transfer.hub.faults = Faults(only=WEIGHTS, statuses=[(429, {"retry-after": "1"}), (503, {})])
    began = time.monotonic()
    transfer.run(WEIGHTS)
    assert transfer.right() and time.monotonic() - began >= 1.0


def test_a_server_that_wants_to_be_left_alone_for_long_is_not_waited_for(transfer: Transfer) -> None:
    transfer.hub.faults = Faults(only=WEIGHTS, statuses=[(429, {"retry-after": "3600"})] * 100)
    with pytest.raises(HubUnavailable) as caught:
        transfer.run(WEIGHTS)
    assert caught.value.retry_after_s == 3600


def test_a_stalled_connection_is_made_anew_and_in_the_end_given_up(transfer: Transfer) -> None:
    transfer.hub.faults = Faults(only=WEIGHTS, stalls=2, cut_after=50_000)
    transfer.run(WEIGHTS)
    assert transfer.right()
    shutil.rmtree(transfer.folder)
    transfer.patience = replace(transfer.patience, attempts=2, stall_s=0.2)
    transfer.hub.faults = Faults(only=WEIGHTS, stalls=10**6)
    with pytest.raises(DownloadStalled, match=r"no byte of model.safetensors came for 0.2 s"):
        transfer.run(WEIGHTS)


def test_an_expired_address_of_the_cdn_is_asked_for_anew(transfer: Transfer) -> None:
    transfer.hub.faults = Faults(only=WEIGHTS, statuses=[(403, {})])
    transfer.run(WEIGHTS)
    assert transfer.right()


def test_a_gated_file_is_explained_and_not_tried_again(transfer: Transfer) -> None:
    transfer.hub.repos["org/m"].gated = True
    with pytest.raises(RepoGated, match="gated") as caught:
        transfer.run(WEIGHTS)
    assert any("accept its terms" in fix for fix in caught.value.fixes)
    assert all(seen.status == 401 for seen in transfer.hub.requests("hub") if "resolve" in seen.path)


def test_a_redirect_to_a_foreign_host_is_refused(transfer: Transfer) -> None:
    transfer.hub.faults.redirect = "https://evil.example/weights?sig=secret"
    with pytest.raises(DownloadHostRefused, match=r"https://evil\.example is not") as caught:
        transfer.run(WEIGHTS)
    assert "secret" not in str(caught.value)


# ── over time ───────────────────────────────────────────────────────────────────────────────────────────────────────
def test_what_is_there_is_not_fetched_again(transfer: Transfer) -> None:
    asyncio.run(stopped_early(transfer))
    there = sum(sum(json.loads(path.read_text())["done"]) for path in (transfer.folder / "journal").glob("*"))
    assert there >= 300_000
    transfer.report = Counted()
    transfer.run(WEIGHTS)
    assert transfer.right() and transfer.report.was_there == there
    assert transfer.report.came == transfer.hub.repos["org/m"].files[WEIGHTS].size - there


def test_a_file_that_changed_on_the_server_meanwhile_restarts(transfer: Transfer) -> None:
    asyncio.run(stopped_early(transfer))
    size = transfer.hub.repos["org/m"].files[WEIGHTS].size
    transfer.hub.repos["org/m"].files[WEIGHTS] = Content(noise(size, 99), lfs=True)
    transfer.run(WEIGHTS)
    assert transfer.right()


@pytest.mark.parametrize("damage", ["no part", "short part", "no journal", "torn journal", "too much", "other parts"])
def test_a_partial_file_that_does_not_add_up_is_begun_anew(transfer: Transfer, damage: str) -> None:
    asyncio.run(stopped_early(transfer))
    part, journal = transfer.folder / "parts" / WEIGHTS, transfer.folder / "journal" / f"{WEIGHTS}.json"
    facts = json.loads(journal.read_text())
    match damage:
        case "no part":
            part.unlink()
        case "short part":
            os.truncate(part, 1000)
        case "no journal":
            journal.unlink()
        case "torn journal":
            journal.write_text(journal.read_text()[:40])
        case "too much":
            journal.write_text(json.dumps({**facts, "done": [count + 10**9 for count in facts["done"]]}))
        case "other parts":
            journal.write_text(json.dumps({**facts, "part": 1 << 20}))
    transfer.run(WEIGHTS)
    assert transfer.right()


def test_a_journal_that_promises_bytes_that_are_not_there_is_found_out_by_the_digest(transfer: Transfer) -> None:
    asyncio.run(stopped_early(transfer))
    part, journal = transfer.folder / "parts" / WEIGHTS, transfer.folder / "journal" / f"{WEIGHTS}.json"
    size = part.stat().st_size
    part.write_bytes(bytes(size))
    assert sum(json.loads(journal.read_text())["done"]) > 0
    transfer.run(WEIGHTS)
    assert transfer.right()


# ── the disk ────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_disk_that_runs_full_is_said_and_what_is_there_is_kept(
    transfer: Transfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, real = [0], os.write

    def write(descriptor: int, data: bytes) -> int:
        if "parts" in os.readlink(f"/proc/self/fd/{descriptor}"):
            if written[0] > 500_000:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written[0] += len(data)
        return real(descriptor, data)

    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc to tell descriptors apart")
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        with pytest.raises(DiskFull) as caught:
            transfer.run(WEIGHTS)
    assert "free_bytes" in caught.value.numbers and caught.value.fixes
    transfer.report = Counted()
    transfer.run(WEIGHTS)
    assert transfer.right() and transfer.report.was_there > 0


def test_room_is_checked_beside_what_others_will_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 0, 100))
    check_room(tmp_path, 60, 40)
    with pytest.raises(DiskFull) as caught:
        check_room(tmp_path, 60, 41)
    assert caught.value.numbers == {"needed_bytes": 60, "free_bytes": 100, "promised_bytes": 41}


def test_a_link_planted_where_a_part_goes_is_not_written_through(transfer: Transfer, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (transfer.folder / "parts").mkdir(parents=True)
    (transfer.folder / "parts" / WEIGHTS).symlink_to(victim)
    with pytest.raises(FreeTokenError):
        transfer.run(WEIGHTS)
    assert victim.read_bytes() == b"precious"
