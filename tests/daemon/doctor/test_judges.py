"""Every check against a machine in order, a broken one and one that does not say. Figures are those of the reports."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import msgspec
import pytest

from freetoken.core.units import Bytes
from freetoken.daemon.doctor.facts import Facts, Folder, Installed, Memory, Model, Past, Port, Program, Record, Torch
from freetoken.daemon.doctor.table import CHECKS, judge
from freetoken.daemon.doctor.verdict import Result, Status, Unknown
from freetoken.daemon.failures import Failure
from freetoken.daemon.native import Commit
from freetoken.daemon.watch.ask import NoAnswer
from freetoken.daemon.watch.cards import Card
from freetoken.daemon.watch.probe import Found, Nothing, Pinned
from tests.fakes.gpus import GIB, H200, LOST, RTX_3070, UNANSWERED


def gib(count: float) -> Bytes:
    return Bytes(int(count * GIB))


def card(document: dict[str, Any], **changes: Any) -> Card:
    return msgspec.convert({**document, **changes}, Card, dec_hook=lambda to, value: to(value))


def linked(**changes: Any) -> Found:
    return Found((card(H200, link={**H200["link"], **changes}),), "580.1", (13, 0))


BIG, SMALL = card(H200), card(RTX_3070)
PROBLEM = {"code": "ENGINE_DIED", "detail": "The engine process crashed (SIGSEGV).", "fixes": [{"title": "Load again"}]}
GOOD = Facts(
    gpus=Found((BIG,), "580.159.04", (13, 0)),
    pins=Pinned(gib(4), refused=False, corrupt=0),
    nvidia_devices=1,
    system="Linux",
    memory=Memory(gib(64), gib(60), limit=None, lock_limit=None),
    commit=Commit(gib(96), gib(80)),
    instructions=frozenset({"sse4_1", "avx", "avx2", "avx512f"}),
    compilers=("/usr/bin/c++",),
    kernels=True,
    torch=Torch("2.11.0+cu130", "13.0"),
    programs=(Program("/home/a/.freetoken/venv/bin/ft", True), Program("/usr/bin/ft", False)),
    installed=Installed("/home/a/.freetoken/venv"),
    disk_free=gib(500),
    folder=Folder("/home/a/.freetoken", exists=True, mode=0o700, token_mode=0o600),
    port=Port(1919, "free"),
    record=Record("none"),
    models=(Model("demo", "complete"),),
    past=Past(None),
)


def result(id: str, **changes: Any) -> Result:
    return judge(next(check for check in CHECKS if check.id == id), replace(GOOD, **changes))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.id)
def test_a_machine_in_order_passes(check: Any) -> None:
    found = judge(check, GOOD)
    assert found.status is Status.PASS, found
    json.dumps(found.to_json())


BROKEN: dict[str, list[tuple[dict[str, Any], str, str]]] = {  # id -> (facts, status, words of the detail or a fix)
    "driver": [
        ({"gpus": Nothing("NVML Shared Library Not Found"), "nvidia_devices": 1}, "fail", "1 NVIDIA card(s)"),
        ({"gpus": Nothing("Driver Not Loaded", installed=True)}, "fail", "No usable NVIDIA driver"),
        ({"gpus": Nothing("NVML Shared Library Not Found"), "nvidia_devices": 0}, "warn", "on the CPU"),
        ({"gpus": Found((BIG, card(LOST)), "580.1", (13, 0))}, "fail", "GPU is lost"),
        ({"gpus": Found((), "580.1", (13, 0))}, "warn", "sees no card"),
    ],
    "cuda": [
        ({"gpus": Found((BIG,), "570.86.15", (12, 8))}, "fail", "580 or newer"),
        ({"gpus": Found((BIG,), "570.86.15", None)}, "fail", "CUDA 13"),
        ({"gpus": Found((BIG,), None, (12, 8))}, "fail", "CUDA 13"),
        ({"torch": Torch("2.13.0+cpu", None)}, "warn", "without CUDA"),
        ({"torch": None}, "skipped", "not installed"),
        ({"gpus": Nothing("none")}, "skipped", "no NVIDIA card"),
    ],
    "capability": [
        ({"gpus": Found((card(H200, compute_capability=[7, 5]),), "580.1")}, "fail", "7.5"),
        ({"gpus": Found((BIG, card(RTX_3070, compute_capability=[7, 5])), "580.1")}, "warn", "RTX 3070"),
    ],
    "vram": [
        ({"gpus": Found((SMALL,), "580.1")}, "warn", "game (pid 77) 2.00 GiB"),
        ({"gpus": Found((card(RTX_3070, vram_free=GIB // 2),), "580.1")}, "fail", "Close game (pid 77)"),
        ({"gpus": Nothing("none")}, "skipped", "no NVIDIA card"),
    ],
    "pcie": [
        ({"gpus": linked(width=4)}, "warn", "4 of 16 lanes"),
        ({"gpus": linked(generation=3, max_generation=3)}, "warn", "its slot does 3.0"),
        ({"gpus": Found((card(RTX_3070, utilisation=99),), "580.1")}, "warn", "under load"),
        ({"gpus": Found((SMALL,), "580.1")}, "pass", "save power"),
    ],
    "pin_limit": [
        ({"pins": Pinned(gib(13.8), True, 0, "error 2")}, "warn", "Only 13.80 GiB"),
        ({"pins": Pinned(gib(4), False, 3)}, "fail", "3 copies"),
        ({"pins": Pinned(gib(0), True, 0, "cuMemHostAlloc gave error 1")}, "fail", "error 1"),
        ({"system": "WSL"}, "warn", "32.00 GiB"),
        ({"system": "Windows", "memory": Memory(gib(63), gib(50), None, None)}, "warn", "31.50 GiB"),
        ({"pins": Nothing("no libcuda")}, "skipped", "no libcuda"),
    ],
    "ram": [
        ({"memory": Memory(gib(64), gib(0.5), None, None)}, "fail", "512.00 MiB of 64.00 GiB"),
        ({"memory": Memory(gib(64), gib(8), None, None)}, "warn", "Close other programs"),
        ({"memory": Memory(gib(64), gib(60), gib(0.5), None)}, "fail", "Raise the memory limit"),
        ({"memory": Memory(gib(125.7), gib(120), gib(124), None)}, "pass", "a limit of 124.00 GiB"),
    ],
    "commit": [
        ({"commit": Commit(gib(36), gib(0.4)), "system": "Windows"}, "fail", "page file"),
        ({"commit": Commit(gib(36), gib(2))}, "warn", "vm.overcommit_memory"),
        ({"commit": None}, "skipped", "Linux"),
    ],
    "system": [({"system": "WSL"}, "warn", ".wslconfig"), ({"system": "sunos"}, "fail", "not supported")],
    "instructions": [
        ({"instructions": frozenset({"sse4_1", "avx"})}, "warn", "no AVX2"),
        ({"instructions": frozenset({"mmx"})}, "fail", "another machine"),
    ],
    "compiler": [({"compilers": ()}, "warn", "nothing needs one")],
    "kernels": [({"kernels": False}, "fail", "installer")],
    "torch": [({"torch": None}, "fail", "no model can run")],
    "installation": [
        ({"installed": Installed("/v", "it crashed (exit code 1)")}, "fail", "Move /v away"),
        ({"installed": None}, "skipped", "no installer"),
    ],
    "command": [
        ({"programs": (Program("/usr/bin/ft", False), Program("/v/bin/ft", True))}, "fail", "Put /v/bin first"),
        ({"programs": (Program("/usr/bin/ft", False),)}, "fail", "/usr/bin/ft"),
        ({"programs": ()}, "warn", "search path"),
    ],
    "disk": [({"disk_free": gib(0.1)}, "fail", "102.40 MiB"), ({"disk_free": gib(9)}, "warn", "FREETOKEN_HOME")],
    "folder": [
        ({"folder": Folder("/f", True, foreign="/f is in use by another program.")}, "fail", "FREETOKEN_HOME"),
        ({"folder": Folder("/f", True, mode=0o755)}, "fail", "0755 instead of 0700"),
        ({"folder": Folder("/f", True, token_mode=0o644)}, "fail", "token has mode 0644"),
        ({"folder": Folder("/f", True, mine=False)}, "fail", "another user"),
        ({"folder": Folder("/f", True, missing=("logs",))}, "warn", "ft doctor --fix"),
        ({"folder": Folder("/f", False)}, "pass", "first start"),
    ],
    "port": [
        ({"port": Port(1919, "stranger", "python (pid 5)")}, "warn", "python (pid 5)"),
        ({"port": Port(1919, "other home", "python (pid 5)")}, "warn", "another state folder"),
        ({"port": Port(1900, "reserved")}, "fail", "excludedportrange"),
        ({"port": Port(1919, "ours")}, "pass", "Our daemon"),
    ],
    "record": [
        ({"record": Record("stale", 7, "http://127.0.0.1:1919")}, "warn", "ft doctor --fix"),
        ({"record": Record("silent", 7, "http://127.0.0.1:1919")}, "fail", "End process 7"),
        ({"record": Record("running", 7, "http://127.0.0.1:1919")}, "pass", "pid 7"),
    ],
    "models": [
        ({"models": (Model("a/b", "partial", "it is partial"), Model("demo", "complete"))}, "fail", "ft pull a/b"),
        ({"models": (Model("local/x", "missing", "nothing is at /x"),)}, "fail", "where they are now"),
        ({"models": (Model("a/b", "unsupported", "family z"),)}, "warn", "cannot run a/b"),
        ({"models": (Model("a/b", "unread"),)}, "inconclusive", "a/b"),
        ({"models": ()}, "skipped", "no model"),
    ],
    "last_failure": [
        ({"past": Past(Failure("2026-01-02T00:00:00.000Z", "demo", PROBLEM))}, "warn", "Load again"),
        ({"past": Past(Failure("2026-01-02", "demo", PROBLEM), "2026-01-01")}, "warn", "SIGSEGV"),
        ({"past": Past(Failure("2026-01-02", "demo", PROBLEM), "2026-01-03")}, "pass", "went well after"),
    ],
}


@pytest.mark.parametrize("id", [check.id for check in CHECKS])
def test_what_is_wrong_is_seen_and_said(id: str) -> None:
    for changes, status, words in BROKEN[id]:
        found = result(id, **changes)
        assert found.status == status, (changes, found)
        assert words in " ".join([found.detail, *found.fixes]), found
        assert found.fixes or found.status in ("pass", "skipped", "inconclusive") or "sees no card" in found.detail
        json.dumps(found.to_json())


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.id)
def test_what_is_not_known_is_inconclusive(check: Any) -> None:
    """Never a fail: a driver that hangs has not shown that the card is too old."""
    blind = Facts(**{field.name: Unknown("it timed out") for field in fields(Facts)})
    found = judge(check, blind)
    assert found.status is Status.INCONCLUSIVE
    assert "it timed out" in found.detail


@pytest.mark.parametrize("id", ["driver", "cuda", "capability", "vram", "pcie"])
def test_a_driver_without_an_answer_is_inconclusive(id: str) -> None:
    assert result(id, gpus=NoAnswer("no answer within 6 s")).status is Status.INCONCLUSIVE


@pytest.mark.parametrize("id", ["capability", "vram", "pcie"])
def test_a_card_that_keeps_a_fact_to_itself_is_inconclusive(id: str) -> None:
    assert result(id, gpus=Found((card(UNANSWERED),), "580.1")).status is Status.INCONCLUSIVE


def test_inconclusive_for_reasons_of_their_own() -> None:
    assert result("pin_limit", pins=NoAnswer("it crashed")).status is Status.INCONCLUSIVE
    assert result("instructions", instructions=None).status is Status.INCONCLUSIVE


def test_a_check_that_breaks_is_inconclusive_and_says_why() -> None:
    found = result("driver", gpus=object())
    assert found.status is Status.INCONCLUSIVE
    assert "AttributeError" in found.detail


def test_two_cards_are_named_and_never_added_up() -> None:
    found = result("vram", gpus=Found((BIG, SMALL), "580.1"))
    assert set(found.evidence) == {BIG.title, SMALL.title}
    total = str(Bytes((BIG.vram_free or 0) + (SMALL.vram_free or 0)))
    assert total not in found.detail
    assert str(BIG.vram_free) in found.detail and str(SMALL.vram_free) in found.detail


def test_the_tables_are_complete() -> None:
    assert set(BROKEN) == {check.id for check in CHECKS}
    assert len({check.id for check in CHECKS}) == len(CHECKS)
