"""A card changed by hand: which card is meant, and whether what came back is what was to come. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from gpuchange.checks import identity
from gpuchange.checks.cards import Card, Smi
from gpuchange.checks.slots import bus_id

_SLOT = re.compile(r"(?:[0-9a-f]{1,8}:)?[0-9a-f]{1,2}:[0-9a-f]{1,2}\.[0-7]", re.I)


class Comes(BaseModel):
    """What is known of the card that comes; None: not said."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    serial: str | None = None
    uuid: str | None = None
    name: str | None = None
    vbios: str | None = None

    def __str__(self) -> str:
        said = [f"serial {self.serial}" if self.serial else "", self.uuid or "", self.name or ""]
        known = [part for part in said if part]
        return ", ".join(known) if known else "a card of the same model"


class Swap(NamedTuple):
    """One slot: the card that is in it now (None: it does not answer), and what comes."""

    slot: str
    goes: Card | None
    comes: Comes

    def __str__(self) -> str:
        return f"slot {self.slot}: {described(self.goes)} goes, {self.comes} comes"


class Resolved(NamedTuple):
    """`swaps` still to be made (`in_place`: those whose new card is there already), and what stands against them."""

    swaps: tuple[Swap, ...] = ()
    in_place: tuple[Swap, ...] = ()
    problems: tuple[str, ...] = ()


class Found(NamedTuple):
    """`problems` need a human; `notes` are worth knowing."""

    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def described(card: Card | None) -> str:
    if card is None:
        return "the card that does not answer"
    return f"serial {card.serial or 'unknown'} ({card.uuid or 'no UUID'}, {card.name or 'unknown model'})"


def is_slot(text: str) -> bool:
    return _SLOT.fullmatch(text.strip()) is not None


# ---------------------------------------------------------------------------------------------- which card is meant


def resolve(entries: Iterable[Mapping[str, Any]], smi: Smi, on_bus: Collection[str]) -> Resolved:
    """The cards that `entries` ({goes: serial | UUID | slot, comes: {...}}) mean among those that are there."""
    swaps, in_place, problems = [], [], []
    for entry in entries:
        goes, comes = str(entry.get("goes", "")), Comes.model_validate(entry.get("comes") or {})
        arrived = _arrived(comes, smi.cards)
        meant = [card for card in smi.cards if _means(goes, card)]
        if arrived and (not meant or meant == [arrived]):
            in_place.append(Swap(arrived.bus_id, None, comes))
        elif arrived:
            problems.append(f"{comes} is in slot {arrived.bus_id} already, and {goes} in {meant[0].bus_id} is to go")
        elif meant:
            swaps.append(Swap(meant[0].bus_id, meant[0], comes))
        elif is_slot(goes) and bus_id(goes) in on_bus and bus_id(goes) not in {card.bus_id for card in smi.cards}:
            swaps.append(Swap(bus_id(goes), None, comes))
        else:
            problems.append(_unknown(goes, smi))
    return Resolved(tuple(swaps), tuple(in_place), (*problems, *_twice([*swaps, *in_place])))


def _arrived(comes: Comes, cards: Iterable[Card]) -> Card | None:
    return next(
        (
            card
            for card in cards
            if (comes.serial and card.serial == comes.serial) or (comes.uuid and card.uuid == comes.uuid)
        ),
        None,
    )


def _means(goes: str, card: Card) -> bool:
    text = goes.strip()
    return text in (card.serial, card.uuid) or (is_slot(text) and bus_id(text) == card.bus_id)


def _unknown(goes: str, smi: Smi) -> str:
    if not smi.ok:
        return f"which card is {goes}? The cards cannot be read ({smi.why}); name the slot as lspci shows it"
    there = "; ".join(f"{card.bus_id} {described(card)}" for card in smi.cards) or "none"
    return f"no card is {goes}; there are: {there}"


def _twice(swaps: Sequence[Swap]) -> list[str]:
    slots = [swap.slot for swap in swaps]
    return [f"slot {slot} is named twice" for slot in sorted({slot for slot in slots if slots.count(slot) > 1})]


def back(swaps: Iterable[Swap]) -> tuple[Swap, ...]:
    """The same slots on the way back: whatever is in them goes, the card that was there comes."""
    return tuple(Swap(swap.slot, None, _as_was(swap.goes)) for swap in swaps)


def _as_was(card: Card | None) -> Comes:
    return Comes(serial=card.serial, uuid=card.uuid, name=card.name, vbios=card.vbios) if card else Comes()


# ------------------------------------------------------------------------------------------------ what came back


def judge(
    swaps: Sequence[Swap], before: Smi, now: Smi, on_bus: Collection[str], was_on_bus: Collection[str] = ()
) -> Found:
    """The cards after the hands: each swapped slot as announced, everything else as `before`."""
    if not now.ok:
        dead = f" (no answer from {', '.join(now.dead)})" if now.dead else ""
        return Found((f"the cards cannot be read: {now.why}{dead}",))
    slots = {swap.slot for swap in swaps}
    problems: list[str] = []
    notes: list[str] = []
    for swap in swaps:
        wrong, odd = _slot(swap, before, now, on_bus)
        problems += wrong
        notes += odd
    rest = [[card for card in smi.cards if card.bus_id not in slots] for smi in (before, now)]
    if before.ok:
        others = [line for line in identity.compare_cards(rest[0], rest[1], on_bus) if not line.endswith(" GPUs")]
        count = f"{len(now.cards)} of {len(before.cards)} GPUs"
        problems += [count, *others] if any(line.startswith("missing") for line in others) else others
        problems += [line for card in rest[1] for line in _link(card, _at(before, card.bus_id), as_before=True)]
    else:
        extra = sorted(set(on_bus) - set(was_on_bus))
        problems += [f"a card at {slot} that was not on the bus before" for slot in extra]
    return Found(tuple(problems), tuple(notes))


def _at(smi: Smi, slot: str) -> Card | None:
    return next((card for card in smi.cards if card.bus_id == slot), None)


def _slot(swap: Swap, before: Smi, now: Smi, on_bus: Collection[str]) -> tuple[list[str], list[str]]:
    card, was = _at(now, swap.slot), swap.goes or _at(before, swap.slot)
    if card is None:
        return [_empty(swap, now, on_bus)], []
    if swap.goes and card.uuid and card.uuid == swap.goes.uuid:
        return [f"slot {swap.slot} still holds {described(card)}; expected {swap.comes}"], []
    expected = swap.comes.model_copy(update={"name": swap.comes.name or (was.name if was else None)})
    wrong = [
        f"{label} {getattr(card, field) or 'unknown'}, expected {wanted}"
        for field, label in (("serial", "serial"), ("uuid", "UUID"), ("name", "model"), ("vbios", "VBIOS"))
        if (wanted := getattr(expected, field)) and getattr(card, field) != wanted
    ]
    problems = [f"slot {swap.slot} holds the wrong card {card.uuid}: {'; '.join(wrong)}"] if wrong else []
    problems += _link(card, was) + _memory(card, was)
    return problems, _notes(swap, card, was)


def _empty(swap: Swap, now: Smi, on_bus: Collection[str]) -> str:
    place = "is on the PCI bus but not initialised" if swap.slot in on_bus else "is not on the PCI bus"
    elsewhere = _arrived(swap.comes, now.cards)
    found = f"; {described(elsewhere)} sits in slot {elsewhere.bus_id}" if elsewhere else ""
    return f"slot {swap.slot} has no working card (it {place}); expected {swap.comes}{found}"


def _number(text: str | None) -> int:
    found = re.search(r"\d{1,6}", text or "")
    return int(found[0]) if found else 0


def _link(card: Card, was: Card | None, as_before: bool = False) -> list[str]:
    """A link that trained too narrow. Its speed now says nothing: an idle card lowers it; what it can reach does."""
    width, most = _number(card.link_width), _number(card.link_width_max)
    before = _number(was.link_width) if was else 0
    wanted = before if as_before else max(most, before)
    problems = []
    if 0 < width < wanted:
        problems.append(f"slot {card.bus_id}: link of {card.uuid} is x{width}, expected x{wanted}: reseat it")
    gen, gen_before = _number(card.link_gen_max), _number(was.link_gen_max) if was else 0
    if gen and gen < gen_before and was and was.name == card.name:
        problems.append(f"slot {card.bus_id}: link of {card.uuid} reaches generation {gen} only, expected {gen_before}")
    return problems


def _memory(card: Card, was: Card | None) -> list[str]:
    size, before = _number(card.memory), _number(was.memory) if was else 0
    if was is None or was.name != card.name or not size or size >= before:
        return []
    return [f"slot {card.bus_id}: {card.uuid} has {size} MiB of memory, expected {before} MiB"]


def _notes(swap: Swap, card: Card, was: Card | None) -> list[str]:
    width = f", link x{_number(card.link_width)} of x{_number(card.link_width_max)}" if card.link_width else ""
    about = f"VBIOS {card.vbios or 'unknown'}{width}, {card.memory or 'memory unknown'}"
    lines = [f"slot {swap.slot}: {described(card)}, {about}"]
    moved = (("VBIOS", "vbios"), ("ECC", "ecc"), ("MIG mode", "mig_mode"), ("power limit", "power_limit"))
    for label, field in moved:
        old, new = (getattr(was, field), getattr(card, field)) if was else (None, None)
        if old != new:
            lines.append(f"slot {swap.slot}: {label} was {old or 'unknown'}, is {new or 'unknown'}")
    return lines
