"""From what a child says of the cards to typed facts and to the planner's Gpu."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from freetoken.core.units import Bytes
from freetoken.daemon.watch.ask import NoAnswer
from freetoken.daemon.watch.cards import Card, Link, as_gpu
from freetoken.daemon.watch.probe import GPU_PROBE, Found, Nothing, Pinned, probe_gpus, probe_pins
from freetoken.plan.hardware import ASSUMED_LINK
from tests.fakes.gpus import GIB, H200, LOST, RTX_3070, UNANSWERED, document
from tests.fakes.probe_child import command


def found(*cards: dict[str, Any]) -> Found:
    probe = probe_gpus(command("say", json.dumps(document(*cards))))
    assert isinstance(probe, Found), probe
    return probe


def test_five_cards_are_five_cards_with_their_own_memory() -> None:
    """FT #43: one of five was shown. 1 x 141 GB and 4 x 48 GB."""
    small = {**RTX_3070, "vram_total": 48 * GIB, "vram_free": 47 * GIB}
    probe = found(H200, *({**small, "uuid": f"GPU-{n}"} for n in range(4)))
    assert (probe.driver, probe.cuda) == ("580.159.04", (13, 0))
    assert [card.vram_total for card in probe.cards] == [150754820096, *[48 * GIB] * 4]
    assert len({card.uuid for card in probe.cards}) == 5
    assert isinstance(probe.cards[0].vram_free, Bytes)


def test_a_card_for_the_planner() -> None:
    gpu = as_gpu(found(H200).cards[0])
    assert gpu is not None
    assert (gpu.vram_free, gpu.compute_capability, gpu.display) == (145262510080, (9, 0), False)
    assert [(h.pid, h.name, h.bytes) for h in gpu.holders] == [(428, "python3", 4838129664)]
    assert gpu.link_bytes_s == int(3.938e9 * 16 * 0.85)
    assert gpu.memory_bytes_s == pytest.approx(4.8e12 * 0.85, rel=0.02), "the data sheet says 4.8 TB/s"
    assert gpu.flops == pytest.approx(989e12 * 0.7, rel=0.1), "the data sheet says 989 TFLOP/s bf16 (boost clock lower)"


def test_an_idle_card_is_planned_with_the_generation_that_it_wakes_up_to() -> None:
    gpu = as_gpu(found(RTX_3070).cards[0])
    assert gpu is not None
    assert gpu.link_bytes_s == int(1.969e9 * 16 * 0.85)
    assert gpu.memory_bytes_s == pytest.approx(448e9 * 0.85, rel=0.01), "the data sheet says 448 GB/s"
    assert [holder.pid for holder in gpu.holders] == [77], "a holder of an unknown amount is in no sum"
    narrow = as_gpu(replace(found(RTX_3070).cards[0], link=Link(3, 4, 3, 16)))
    assert narrow is not None
    assert narrow.link_bytes_s == int(0.985e9 * 4 * 0.85)


def test_a_card_that_does_not_answer_is_not_planned_with() -> None:
    probe = found(LOST, UNANSWERED)
    assert [card.problem for card in probe.cards] == ["GPU is lost", None]
    assert [as_gpu(card) for card in probe.cards] == [None, None]
    silent = as_gpu(Card("GPU-0", vram_total=Bytes(GIB), vram_free=Bytes(GIB)))
    assert silent is not None
    assert silent.link_bytes_s == ASSUMED_LINK


def test_nothing_is_not_the_same_as_no_answer() -> None:
    said = json.dumps({"installed": True, "reason": "Driver Not Loaded"})
    assert probe_gpus(command("say", said)) == Nothing("Driver Not Loaded", installed=True)
    assert isinstance(probe_gpus(command("hang"), deadline_s=0.3), NoAnswer)
    assert isinstance(probe_gpus(command("crash")), NoAnswer)


@pytest.mark.parametrize(
    "said", ['{"cards": 3}', '{"cards": [{}]}', "{}", '{"cards": [{"uuid": "x", "vram_free": "a"}]}']
)
def test_an_answer_of_another_shape_is_no_answer(said: str) -> None:
    assert isinstance(probe_gpus(command("say", said)), NoAnswer)


def test_the_real_child_says_something_on_any_machine() -> None:
    probe = probe_gpus()
    assert isinstance(probe, Found | Nothing), probe


def test_pins() -> None:
    said = json.dumps({"pinned": 13 * GIB, "refused": True, "corrupt": 0, "error": "cuMemHostAlloc gave error 2"})
    plenty = Bytes(64 * GIB)
    assert probe_pins(plenty, command("say", said)) == Pinned(Bytes(13 * GIB), True, 0, "cuMemHostAlloc gave error 2")
    assert probe_pins(plenty, command("say", '{"skipped": "no libcuda"}')) == Nothing("no libcuda")
    assert isinstance(probe_pins(plenty, command("hang"), deadline_s=0.3), NoAnswer)


def test_the_pin_probe_takes_a_bounded_share() -> None:
    """The bounds travel as arguments: at most 4 GiB, at most a quarter of what is free."""
    echo = (sys.executable, "-c", "import json, sys; print(json.dumps({'skipped': ' '.join(sys.argv[1:])}))")
    assert probe_pins(Bytes(64 * GIB), echo) == Nothing(f"{4 * GIB} 3")
    assert probe_pins(Bytes(2 * GIB), echo) == Nothing(f"{GIB // 2} 3")


def test_the_child_imports_nothing_heavy() -> None:
    code = (
        f"import sys, {GPU_PROBE[-1]}; print([m for m in ('torch', 'numpy', 'fastapi', 'httpx') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "[]"
