"""Judging a host that is watched in service: cards, temperatures, errors, services, reboots. Pure."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuchange.checks import kernel_log, smi_text
from gpuchange.checks.slots import bus_id

QUERY = (
    "index", "uuid", "pci.bus_id", "temperature.gpu", "ecc.errors.uncorrected.volatile.total",
    "clocks_throttle_reasons.active",
)  # fmt: skip
"""What is asked of nvidia-smi, in this order. `throttle` is understood by old drivers and new ones."""

SLOWED_BY = {0x08: "hardware", 0x20: "heat (software limit)", 0x40: "heat (hardware limit)", 0x80: "power brake"}
"""Bits of the clock event reasons that say that something is wrong; idle, power cap and chosen clocks do not."""


@dataclass(frozen=True)
class Reading:
    """One card at one moment; None where the card does not tell."""

    uuid: str
    pci: str
    temperature: int | None
    uncorrected: int | None
    slowed: int | None
    sick: str = ""
    """What stands where a well card tells a value: `GPU requires reset`."""

    @property
    def name(self) -> str:
        return f"GPU {self.pci}"


@dataclass(frozen=True)
class Limits:
    """What the plan allows. `cards`: UUIDs that must answer; empty: those of the first look."""

    max_temperature: int = 90
    accept_xids: frozenset[int] = frozenset()
    cards: tuple[str, ...] = ()


def readings(said: Mapping[str, Any]) -> tuple[tuple[Reading, ...], str]:
    """The cards that answered and, if nvidia-smi did not answer for all, what it said."""
    try:
        rows = smi_text.csv_rows(str(said.get("out") or ""), len(QUERY))
    except csv.Error as error:
        return (), f"what nvidia-smi said cannot be read: {error}"
    cards = tuple(_reading(row) for row in rows if row[1].startswith("GPU-"))
    if said.get("hung"):
        return cards, "nvidia-smi hangs"
    if said.get("rc") != 0:
        text = f"{said.get('out') or ''}\n{said.get('err') or ''}"
        first = next((line.strip() for line in text.splitlines() if line.strip() and "GPU-" not in line), "nothing")
        return cards, f"nvidia-smi ended with {said.get('rc')}: {first[:200]}"
    return cards, ""


def _reading(row: Sequence[str]) -> Reading:
    sick = next(filter(None, map(smi_text.sickness, row[3:])), "")
    return Reading(row[1], bus_id(row[2]), _number(row[3]), _number(row[4]), _number(row[5]), sick)


def _number(text: str) -> int | None:
    try:
        return int(text, 0)
    except ValueError:
        return None


def faults(now: Mapping[str, Any], first: Mapping[str, Any], limits: Limits) -> tuple[str, ...]:
    """Everything that speaks against the host, as sentences. `first` is the first look of this watch."""
    return tuple(fault for check in (_boots, _cards, _heat, _log, _services) for fault in check(now, first, limits))


def _boots(now: Mapping[str, Any], first: Mapping[str, Any], _limits: Limits) -> Iterator[str]:
    if now.get("boot_id") != first.get("boot_id"):
        yield "the host was rebooted while it was watched"


def _cards(now: Mapping[str, Any], first: Mapping[str, Any], limits: Limits) -> Iterator[str]:
    cards, trouble = readings(now.get("smi") or {})
    if trouble:
        yield trouble
    before = readings(first.get("smi") or {})[0]
    expected = limits.cards or tuple(card.uuid for card in before)
    yield from (f"{card.name} is not well: {card.sick}" for card in cards if card.sick)
    lost = sorted(set(expected) - {card.uuid for card in cards})
    yield from (f"{_named(uuid, before)} does not answer any more" for uuid in lost)
    if not expected and not cards:
        yield "no card answers"
    had = {card.uuid: card.uncorrected or 0 for card in before}
    for card in cards:
        grown = (card.uncorrected or 0) - had.get(card.uuid, 0)
        if grown > 0:
            yield f"{card.name}: {grown} uncorrectable memory errors since the watch began"


def _named(uuid: str, cards: Sequence[Reading]) -> str:
    return next((card.name for card in cards if card.uuid == uuid), uuid)


def _heat(now: Mapping[str, Any], _first: Mapping[str, Any], limits: Limits) -> Iterator[str]:
    for card in readings(now.get("smi") or {})[0]:
        if card.temperature is not None and card.temperature > limits.max_temperature:
            yield f"{card.name}: {card.temperature} °C, at most {limits.max_temperature} °C are allowed"
        reasons = [word for bit, word in SLOWED_BY.items() if (card.slowed or 0) & bit]
        if reasons:
            yield f"{card.name}: clocks are slowed down by {', '.join(reasons)}"


def _log(now: Mapping[str, Any], _first: Mapping[str, Any], limits: Limits) -> Iterator[str]:
    yield from kernel_log.bad(kernel_log.parse(str((now.get("log") or {}).get("text") or "")), limits.accept_xids)


def _services(now: Mapping[str, Any], first: Mapping[str, Any], _limits: Limits) -> Iterator[str]:
    present = now.get("services") or {}
    for unit, before in sorted((first.get("services") or {}).items()):
        state = present.get(unit) or {}
        if before.get("active") == "active" and state.get("active") != "active":
            yield f"{unit} is {state.get('active') or 'gone'}"
        restarts = (_number(str(state.get("restarts"))) or 0) - (_number(str(before.get("restarts"))) or 0)
        if restarts > 0:
            yield f"{unit} was restarted {restarts} time(s) by systemd"


def notes(now: Mapping[str, Any], limits: Limits) -> tuple[str, ...]:
    """What is worth saying but stops nothing: accepted Xids, a kernel log that cannot be read."""
    log = now.get("log") or {}
    events = kernel_log.parse(str(log.get("text") or ""))
    accepted = tuple(f"{event.sentence}: accepted by the plan" for event in events if event.xid in limits.accept_xids)
    return (*accepted, str(log["why"])) if log.get("why") else accepted
