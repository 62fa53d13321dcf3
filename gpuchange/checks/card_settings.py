"""What an operator has set on the cards (MIG, ECC, persistence, limits), and what of it a change has lost. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gpuchange.checks import smi_text
from gpuchange.checks.cards import Card

NAMES = {
    "ecc": "ECC mode",
    "mig_mode": "MIG mode",
    "persistence": "persistence mode",
    "power_limit": "power limit",
    "compute_mode": "compute mode",
    "clocks": "application clocks",
}
"""Settings and what they are called. Clocks locked by `-lgc` are none of them: no driver tells them."""
UNTOLD = frozenset({"clocks"})
"""Settings that newer drivers do not tell any more: gone from the text is not gone from the card."""
PENDING = {"ecc": "ecc_pending", "mig_mode": "mig_pending"}


class Lost(NamedTuple):
    """`problems`: settings that are not as before; `notes`: worth knowing."""

    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def compare(before: Sequence[Card], now: Sequence[Card], but: Collection[str] = ()) -> Lost:
    """The same slot's card before and after, the slots `but` left out (their cards were exchanged)."""
    was = {card.bus_id: card for card in before if not card.sick and card.bus_id not in but}
    pairs = [(index, was[card.bus_id], card) for index, card in enumerate(now) if card.bus_id in was and not card.sick]
    problems = [line for pair in pairs for look in (_geometry, _modes, _asked_for) for line in look(*pair)]
    notes = [line for pair in pairs for line in _renamed(*pair)]
    return Lost(tuple(problems), tuple(notes))


def pending(cards: Sequence[Card]) -> tuple[str, ...]:
    """Modes that have been asked for and do not count yet."""
    return tuple(line for index, card in enumerate(cards) for line in _pending(index, card))


def _label(index: int, card: Card) -> str:
    return f"GPU {index} ({card.bus_id})"


def _geometry(index: int, old: Card, card: Card) -> Iterator[str]:
    if old.geometry != card.geometry:
        again = f": {command}" if (command := create(index, old)) and card.geometry == "none" else ""
        yield f"MIG geometry differs: had {old.geometry} on {_label(index, card)}, now {card.geometry}{again}"


def create(index: int, card: Card) -> str:
    """The command that makes this card's MIG devices again; '' where a GPU instance is shared or its place unknown."""
    shared = len({device.instance for device in card.mig}) != len(card.mig)
    known = all(device.place and re.fullmatch(r"\d+g\.\S+", device.profile) for device in card.mig)
    if shared or not card.mig or not known:
        return ""
    return f"nvidia-smi mig -i {index} -cgi {','.join(_tuples(card))} -C"


def goal(cards: Sequence[Card]) -> list[dict[str, Any]]:
    """What the host needs to set the cards so again; devices only where `create` knows how."""
    return [
        {
            "uuid": card.uuid,
            "persistence": card.persistence,
            "power_limit": smi_text.number(card.power_limit),
            "mig_mode": card.mig_mode,
            "mig": _tuples(card) if create(0, card) else [],
        }
        for card in cards
        if card.uuid and not card.sick
    ]


def restored(rows: Iterable[Any]) -> tuple[str, ...]:
    """What was set again, in words; what could not be set with the tool's own."""
    told = [row for row in rows if isinstance(row, Mapping)]
    return tuple(
        f"set again: {row.get('command')}"
        if row.get("rc") == 0
        else f"could not be set again: {row.get('command')}: {str(row.get('said') or 'no answer')[:200]}"
        for row in told
    )


def _tuples(card: Card) -> list[str]:
    return [f"{device.profile}:{device.place.partition(':')[0]}" for device in card.mig]


def _modes(index: int, old: Card, card: Card) -> Iterator[str]:
    for field, name in NAMES.items():
        was, found = getattr(old, field), getattr(card, field)
        if was is None or _same(was, found) or (found is None and field in UNTOLD):
            continue
        waits = f", {was} is pending: a reset or reboot is still needed" if _waits(field, card) == was else ""
        yield f"{name} of {_label(index, card)} should be {was}, is {found or 'not told'}{waits}"


def _same(was: str, found: str | None) -> bool:
    """Another driver may round watts otherwise."""
    one, two = smi_text.number(was), smi_text.number(found)
    return was == found or (one is not None and two is not None and abs(one - two) < 1)


def _waits(field: str, card: Card) -> str | None:
    return getattr(card, PENDING[field]) if field in PENDING else None


def _pending(index: int, card: Card) -> Iterator[str]:
    yield from (line for field in PENDING for line in _waiting(index, card, field))


def _waiting(index: int, card: Card, field: str) -> Iterator[str]:
    mode, waits = getattr(card, field), _waits(field, card)
    if waits and mode and waits != mode:
        yield f"{NAMES[field]} of {_label(index, card)} is {mode}, {waits} is pending: a reset or reboot makes it count"


def _asked_for(index: int, old: Card, card: Card) -> Iterator[str]:
    """A mode that somebody has asked for since: the next reset would change the card."""
    same = {field for field in PENDING if getattr(old, field) == getattr(card, field)}
    known = set(_pending(index, old))
    yield from (
        line for field in PENDING if field in same for line in _waiting(index, card, field) if line not in known
    )


def _renamed(index: int, old: Card, card: Card) -> Iterator[str]:
    """Instances made anew may have new UUIDs, which configuration may name."""
    gone = sorted({device.uuid for device in old.mig if device.uuid} - {device.uuid for device in card.mig})
    if gone and old.geometry == card.geometry:
        yield f"MIG UUIDs of {_label(index, card)} changed: {', '.join(gone)} are gone"


def sentences(cards: Sequence[Card]) -> tuple[str, ...]:
    """What is set, card by card, as it is recorded: only what an operator may have set."""
    return tuple(_sentence(index, card) for index, card in enumerate(cards))


def _sentence(index: int, card: Card) -> str:
    told = [f"{name} {getattr(card, field)}" for field, name in NAMES.items() if getattr(card, field)]
    told += [f"MIG devices {card.geometry}"] if card.mig or card.mig_mode == "Enabled" else []
    return f"{_label(index, card)}: {', '.join(told) or 'nothing told'}"
