"""Checks of the NVIDIA cards: driver, CUDA, capability, memory, PCIe link, pinned memory. Pure.

Cards are named one by one; their memory is never added up. Does not know how the facts were found.
"""

from __future__ import annotations

from collections.abc import Mapping

from freetoken.core.units import Bytes
from freetoken.daemon.doctor.facts import Facts
from freetoken.daemon.doctor.verdict import Status, Undecided, Unknown, Verdict, failed, known, passed, skipped, warned
from freetoken.daemon.watch.ask import NoAnswer
from freetoken.daemon.watch.cards import Card, Link
from freetoken.daemon.watch.probe import Found, Nothing

CAPABILITY = (8, 0)  # the first with bf16 tensor cores
DRIVERS = {11: 450, 12: 525, 13: 580}  # CUDA major version -> oldest driver: CUDA compatibility guide, minor versions
FREE_AT_LEAST = Bytes(1 << 30)  # below this a card is full
HELD_SHARE = 0.2  # of a card in the hands of others
BUSY = 50  # percent of use at which a link is no longer asleep
CAPPED = {"WSL": 0.5, "Windows": 0.5}  # about this share of RAM may be pinned
NO_CARD = "there is no NVIDIA card to look at"
FULL_LINK = "Put the card into the slot next to the processor, and seat it again"


def driver(facts: Facts) -> Verdict:
    """Whether a driver is there and answers."""
    probe = _probe(facts)
    if isinstance(probe, Nothing):
        return _no_driver(probe, facts)
    lost = [card for card in probe.cards if card.problem]
    evidence = {"driver": probe.driver, "cuda": _dotted(probe.cuda), "cards": [card.title for card in probe.cards]}
    if lost:
        what = "; ".join(f"{card.uuid}: {card.problem}" for card in lost)
        return failed(f"A card does not answer ({what}).", "Restart the computer", **evidence)
    if not probe.cards:
        return warned(f"Driver {probe.driver} runs, but sees no card; models run on the CPU.", **evidence)
    return passed(f"Driver {probe.driver}: {_listed(probe.cards)}.", **evidence)


def cuda(facts: Facts) -> Verdict:
    """Whether the driver runs the CUDA version that torch was built with."""
    torch, probe = known(facts.torch), _found(facts)
    if probe is None or not probe.cards:
        return skipped(NO_CARD)
    if torch is None:
        return skipped("torch is not installed")
    evidence = {"torch": torch.version, "torch_cuda": torch.cuda, "driver": probe.driver, "cuda": _dotted(probe.cuda)}
    if torch.cuda is None:
        what = f"torch {torch.version} is built without CUDA, so the card is not used"
        return warned(f"{what}.", "Install torch with CUDA", **evidence)
    major = int(torch.cuda.partition(".")[0])
    oldest, have = DRIVERS.get(major), _major(probe.driver)
    if probe.cuda is None and (oldest is None or have is None):
        raise Undecided("the driver does not say which CUDA it runs")
    too_old = probe.cuda[0] < major if probe.cuda else (have or 0) < (oldest or 0)
    if too_old or (oldest and have and have < oldest):
        return failed(
            f"torch {torch.version} needs an NVIDIA driver for CUDA {major}; this is {probe.driver}.",
            f"Install NVIDIA driver {oldest or 'for CUDA ' + str(major)} or newer, then restart",
            **evidence,
        )
    return passed(f"Driver {probe.driver} runs CUDA {torch.cuda} of torch {torch.version}.", **evidence)


def capability(facts: Facts) -> Verdict:
    """Whether a card is new enough for the kernels."""
    cards = _cards(facts)
    if not cards:
        return skipped(NO_CARD)
    asked = [card for card in cards if card.compute_capability]
    if not asked:
        raise Undecided("the driver does not say the compute capability of any card")
    evidence = {card.title: _dotted(card.compute_capability) for card in asked}
    old = [card for card in asked if card.compute_capability and card.compute_capability < CAPABILITY]
    if not old:
        return passed(f"{_each(evidence)}.", **evidence)
    what = f"Too old, {_dotted(CAPABILITY)} is needed: {_each({c.title: evidence[c.title] for c in old})}."
    if len(old) == len(asked):
        return failed(what, "Run models on the CPU, or use a card of the RTX 30 series or newer", **evidence)
    return warned(what, "Use the other card", **evidence)


def vram(facts: Facts) -> Verdict:
    """What is free on each card, and who holds the rest."""
    cards = _cards(facts)
    if not cards:
        return skipped(NO_CARD)
    asked = [card for card in cards if card.vram_total and card.vram_free is not None]
    if not asked:
        raise Undecided("the driver does not say how much memory any card has")
    evidence = {card.title: _memory(card) for card in asked}
    detail = "; ".join(_memory_words(card) for card in asked) + "."
    fixes = tuple(_close(card) for card in asked if _held(card) > HELD_SHARE * (card.vram_total or 0))
    if all((card.vram_free or 0) < FREE_AT_LEAST for card in asked):
        return failed(f"No card has {FREE_AT_LEAST} free: {detail}", *fixes, **evidence)
    return warned(detail, *fixes, **evidence) if fixes else passed(detail, **evidence)


def pcie(facts: Facts) -> Verdict:
    """Whether a link is slower than the card. An idle card lowers its generation to save power: no fault."""
    asked = [card for card in _cards(facts) if card.link.width and card.link.max_width]
    if not _cards(facts):
        return skipped(NO_CARD)
    if not asked:
        raise Undecided("the driver does not say how any card is connected")
    evidence = {card.title: _link(card.link) for card in asked}
    slow = [f"{card.title} {why}" for card in asked if (why := _slower(card))]
    if slow:
        return warned(f"Slower than the card could be: {'; '.join(slow)}.", FULL_LINK, **evidence)
    asleep = any((card.link.generation or 0) < (card.link.max_generation or 0) for card in asked)
    note = " (an idle card lowers its generation to save power)" if asleep else ""
    return passed(f"{_each(evidence)}{note}.", **evidence)


def pin_limit(facts: Facts) -> Verdict:
    """How much memory the driver pins, and whether copies from there arrive."""
    pins, memory, system = facts.pins, known(facts.memory), known(facts.system)
    if isinstance(pins, NoAnswer | Unknown):
        raise Undecided(f"pinning was tried in a process of its own: {pins.reason}")
    if isinstance(pins, Nothing):
        return skipped(f"CUDA is not there to pin memory ({pins.reason})")
    cap = CAPPED.get(system)
    evidence = {
        "pinned_bytes": pins.pinned,
        "refused": pins.refused,
        "corrupt_samples": pins.corrupt,
        "lock_limit_bytes": memory.lock_limit,
        "known_cap_bytes": int(cap * memory.total) if cap else None,
    }
    if pins.corrupt:
        update = "Run `wsl --shutdown`, update WSL and the driver" if system == "WSL" else "Update the driver"
        return failed(f"{pins.corrupt} copies from pinned memory came back changed.", update, **evidence)
    if pins.error and not pins.pinned:
        return failed(f"No memory can be pinned: {pins.error}.", "Restart the computer; update the driver", **evidence)
    if pins.refused:
        what = f"Only {pins.pinned} can be pinned; experts beyond that are copied slowly"
        return warned(f"{what}.", *_more_pins(system), **evidence)
    if cap:
        about = Bytes(int(cap * memory.total))
        return warned(f"{system} pins about half of the memory, here {about}.", *_more_pins(system), **evidence)
    return passed(f"{pins.pinned} pinned, copied and compared.", **evidence)


def _probe(facts: Facts) -> Found | Nothing:
    if isinstance(facts.gpus, NoAnswer | Unknown):
        raise Undecided(f"the driver was asked in a process of its own: {facts.gpus.reason}")
    return facts.gpus


def _found(facts: Facts) -> Found | None:
    probe = _probe(facts)
    return probe if isinstance(probe, Found) else None


def _cards(facts: Facts) -> tuple[Card, ...]:
    """Those that answer."""
    probe = _found(facts)
    return tuple(card for card in probe.cards if not card.problem) if probe else ()


def _no_driver(probe: Nothing, facts: Facts) -> Verdict:
    devices = facts.nvidia_devices if isinstance(facts.nvidia_devices, int) else None
    evidence = {"reason": probe.reason, "devices_on_the_bus": devices}
    install = "Install the NVIDIA driver, 580 or newer, then restart"
    if probe.installed:
        what = f"No usable NVIDIA driver: it is installed but says {probe.reason!r}"
        return failed(f"{what}.", "Restart the computer; if that does not help, install the driver anew", **evidence)
    if devices:
        return failed(f"No usable NVIDIA driver, though {devices} NVIDIA card(s) are built in.", install, **evidence)
    return Verdict(
        Status.WARN, "No usable NVIDIA driver; models run on the CPU.", evidence, (f"With a card: {install}",)
    )


def _held(card: Card) -> int:
    return sum(holder.bytes or 0 for holder in card.holders)


def _memory(card: Card) -> dict[str, object]:
    holders = [{"pid": h.pid, "name": h.name, "bytes": h.bytes} for h in card.holders]
    return {"total_bytes": card.vram_total, "free_bytes": card.vram_free, "holders": holders}


def _memory_words(card: Card) -> str:
    held = ", ".join(f"{h.name or 'a program'} (pid {h.pid}) {_size(h.bytes)}" for h in card.holders)
    return f"{card.title}: {card.vram_free} of {card.vram_total} free" + (f", held by {held}" if held else "")


def _size(size: Bytes | None) -> str:
    return "an unknown amount" if size is None else str(size)


def _close(card: Card) -> str:
    most = max(card.holders, key=lambda holder: holder.bytes or 0)
    return f"Close {most.name or 'the program'} (pid {most.pid}) to free {_size(most.bytes)}"


def _link(link: Link) -> str:
    now = f"PCIe {link.generation or '?'}.0 x{link.width}"
    return f"{now} of {link.card_generation or link.max_generation or '?'}.0 x{link.max_width}"


def _slower(card: Card) -> str | None:
    """Why the link is a fault: missing lanes, a slot older than the card, or a slow link under load."""
    link = card.link
    if link.width and link.max_width and link.width < link.max_width:
        return f"has {link.width} of {link.max_width} lanes"
    if link.card_generation and link.max_generation and link.max_generation < link.card_generation:
        return f"could do PCIe {link.card_generation}.0, its slot does {link.max_generation}.0"
    if link.generation and link.max_generation and link.generation < link.max_generation:
        busy = card.utilisation is not None and card.utilisation >= BUSY
        return f"stays at PCIe {link.generation}.0 of {link.max_generation}.0 under load" if busy else None
    return None


def _more_pins(system: str) -> tuple[str, ...]:
    if system == "WSL":
        return ("Give WSL more memory (memory= in .wslconfig), then run `wsl --shutdown`",)
    return ("Load with less of the memory (--memory-ratio), so that less must be pinned",)


def _listed(cards: tuple[Card, ...]) -> str:
    return ", ".join(card.title for card in cards)


def _each(facts: Mapping[str, str | None]) -> str:
    return "; ".join(f"{name}: {value}" for name, value in facts.items())


def _dotted(version: tuple[int, int] | None) -> str | None:
    return f"{version[0]}.{version[1]}" if version else None


def _major(driver: str | None) -> int | None:
    head = (driver or "").partition(".")[0]
    return int(head) if head.isdecimal() else None
