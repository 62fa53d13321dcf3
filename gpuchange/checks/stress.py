"""What a stress run says against the cards: wrong results, hangs, Xid, memory errors, heat, slowed clocks. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuchange.checks import kernel_log, smi_text
from gpuchange.checks.slots import bus_id
from gpuchange.checks.snapshot import rows

QUERY = (
    "uuid", "pci.bus_id", "temperature.gpu", "ecc.errors.uncorrected.volatile.total",
    "ecc.errors.corrected.volatile.total", "clocks_throttle_reasons.active", "power.draw", "clocks.current.sm",
)  # fmt: skip
"""What is asked of nvidia-smi while the cards work, in this order. Old drivers and new ones understand `throttle`."""

SLOWED_BY = {0x08: "hardware", 0x20: "heat (software limit)", 0x40: "heat (hardware limit)", 0x80: "power brake"}
POWER_CAP = 0x04
"""Usual under full load, so it is told and does not fail."""

_KILLED = re.compile(r"(?:Out of memory|Memory cgroup out of memory): Killed process (\d+) \(([^)]*)\)", re.I)


@dataclass(frozen=True)
class Limits:
    """`accept_xids`: Xids of before the load that are put down to programs; under the load none is."""

    max_temperature: int = 90
    accept_xids: frozenset[int] = frozenset()
    cards: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sample:
    """One card at one moment; None where it does not tell. Watts, MHz, °C."""

    uuid: str
    pci: str
    temperature: float | None
    uncorrected: float | None
    corrected: float | None
    reasons: int
    watts: float | None
    clock: float | None
    sick: str = ""
    """What stands where a well card tells a value: `GPU requires reset`."""


@dataclass(frozen=True)
class Judged:
    failures: tuple[str, ...]
    notes: tuple[str, ...]


def judge(result: Mapping[str, Any], limits: Limits) -> Judged:
    """All that speaks against the cards, and what is worth saying beside it."""
    cards = [{**card, "uuid": str(card.get("uuid") or "")} for card in rows(result.get("cards"))]
    if not cards:
        return Judged((f"stress: no card could be loaded: {result.get('why') or 'nothing was reported'}",), ())
    samples = [sample for look in rows(result.get("samples")) for sample in readings(look)]
    checks = (
        _loads(cards),
        _absent(cards, limits),
        _smi(result),
        _sick(cards, samples),
        _memory(cards, samples),
        _heat(cards, samples, limits),
    )
    failures = [
        line for lines in (*checks, _log(cards, result, limits), _kills(result), _nccl(result)) for line in lines
    ]
    return Judged(tuple(dict.fromkeys(failures)), tuple(_notes(cards, samples, result, limits)))


def label(card: Mapping[str, Any]) -> str:
    return f"card {card.get('index')} ({card.get('uuid')} at {card.get('pci')})"


def readings(look: Any) -> tuple[Sample, ...]:
    """The cards of one answer of nvidia-smi; rows that are none are left out."""
    out = str(look.get("out") or "") if isinstance(look, Mapping) else ""
    lines = [[cell.strip() for cell in line.split(",")] for line in out.splitlines()]
    return tuple(_sample(row) for row in lines if len(row) == len(QUERY) and row[0].startswith("GPU-"))


def _sample(row: Sequence[str]) -> Sample:
    reasons = int(row[5], 16) if re.fullmatch(r"0x[0-9a-fA-F]{1,16}", row[5]) else 0
    numbers = [float(cell) if re.fullmatch(r"[0-9]{1,15}(\.[0-9]{1,6})?", cell) else None for cell in row]
    sick = next(filter(None, map(smi_text.sickness, row[2:])), "")
    return Sample(row[0], bus_id(row[1]), numbers[2], numbers[3], numbers[4], reasons, numbers[6], numbers[7], sick)


# --- what fails ----------------------------------------------------------------------------------------------


def _loads(cards: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for card in cards:
        if not card.get("ok"):
            yield f"stress: {label(card)}: {card.get('why') or 'the load did not end well'}"
        elif not card.get("rounds"):
            yield f"stress: {label(card)}: no round of the load was done"


def _absent(cards: Sequence[Mapping[str, Any]], limits: Limits) -> Iterator[str]:
    there = {card["uuid"] for card in cards}
    yield from (
        f"stress: {uuid} was not among the cards that could be loaded" for uuid in limits.cards if uuid not in there
    )


def _smi(result: Mapping[str, Any]) -> Iterator[str]:
    looks = rows(result.get("samples"))
    hung = [look for look in looks if look.get("hung")]
    if hung:
        yield f"stress: nvidia-smi hung {len(hung)} of {len(looks)} times while the cards worked"
    bad = next((look for look in looks if not look.get("hung") and look.get("rc") != 0), None)
    if bad is not None:
        said = (f"{bad.get('out') or ''}\n{bad.get('err') or ''}".strip().splitlines() or ["nothing"])[0]
        yield f"stress: nvidia-smi ended with {bad.get('rc')} while the cards worked: {said[:200]}"


def _sick(cards: Sequence[Mapping[str, Any]], samples: Sequence[Sample]) -> Iterator[str]:
    """Cards that could not even be loaded, too: nvidia-smi lists them beside the others."""
    known = {card["uuid"]: label(card) for card in cards}
    for sample in samples:
        if sample.sick:
            name = known.get(sample.uuid, f"card {sample.uuid} at {sample.pci}")
            yield f"stress: {name}: nvidia-smi says of it: {sample.sick}"


def _of(card: Mapping[str, Any], samples: Sequence[Sample]) -> list[Sample]:
    return [sample for sample in samples if sample.uuid == card.get("uuid")]


def _memory(cards: Sequence[Mapping[str, Any]], samples: Sequence[Sample]) -> Iterator[str]:
    for card in cards:
        counts = [sample.uncorrected for sample in _of(card, samples) if sample.uncorrected is not None]
        if counts and counts[-1] > 0:
            grown = counts[-1] - counts[0]
            yield (
                f"stress: {label(card)}: {counts[-1]:.0f} uncorrectable memory errors since the driver was loaded, "
                f"{grown:.0f} of them under load"
            )


def _heat(cards: Sequence[Mapping[str, Any]], samples: Sequence[Sample], limits: Limits) -> Iterator[str]:
    for card in cards:
        mine = _of(card, samples)
        hottest = max((sample.temperature for sample in mine if sample.temperature is not None), default=0.0)
        if hottest > limits.max_temperature:
            yield f"stress: {label(card)}: {hottest:.0f} °C, at most {limits.max_temperature} °C are allowed"
        for bit, word in SLOWED_BY.items():
            often = sum(bool(sample.reasons & bit) for sample in mine)
            if often:
                clock = min((sample.clock for sample in mine if sample.clock is not None), default=None)
                down = f", down to {clock:.0f} MHz" if clock is not None else ""
                yield f"stress: {label(card)}: clocks slowed down by {word} in {often} of {len(mine)} looks{down}"


def _events(result: Mapping[str, Any], key: str) -> tuple[kernel_log.Event, ...]:
    log = result.get(key)
    return kernel_log.parse(str(log.get("text") or "") if isinstance(log, Mapping) else "")


def _log(cards: Sequence[Mapping[str, Any]], result: Mapping[str, Any], limits: Limits) -> Iterator[str]:
    """Events since the change began; those of under the load count whatever their number."""
    under = _events(result, "log_load")
    for event in dict.fromkeys((*_events(result, "log"), *under)):
        if event in under or event.xid not in limits.accept_xids:
            yield f"kernel log: {_named(event, cards)}{' (under load)' if event in under else ''}"


def _named(event: kernel_log.Event, cards: Sequence[Mapping[str, Any]]) -> str:
    card = next((card for card in cards if event.pci and bus_id(str(card.get("pci"))) == event.pci), None)
    if card is None:
        return event.sentence
    return event.sentence.replace(f"GPU {event.pci}", label(card), 1)


def _kills(result: Mapping[str, Any]) -> Iterator[str]:
    log = result.get("log_load")
    killed = _KILLED.findall(str(log.get("text") or "") if isinstance(log, Mapping) else "")
    if killed:
        who = ", ".join(f"{name} ({pid})" for pid, name in killed[:5])
        yield f"stress: the host ran out of memory; the kernel killed {who}"


def _nccl(result: Mapping[str, Any]) -> Iterator[str]:
    said = result.get("nccl")
    if isinstance(said, Mapping) and not said.get("ok"):
        yield f"stress: NCCL all-reduce failed: {said.get('why')}"


# --- what is told --------------------------------------------------------------------------------------------


def _notes(
    cards: Sequence[Mapping[str, Any]], samples: Sequence[Sample], result: Mapping[str, Any], limits: Limits
) -> Iterator[str]:
    yield f"stress: {len(cards)} card(s) loaded for {result.get('seconds')} s by {result.get('load') or 'built-in'}"
    if result.get("note"):
        yield f"stress: {result['note']}"
    if isinstance(result.get("nccl"), Mapping) and result["nccl"].get("ok"):
        yield f"stress: NCCL all-reduce over {len(cards)} cards is right"
    yield from (line for card in cards for line in _told(card, _of(card, samples)))
    yield from (
        f"kernel log: {_named(e, cards)}: accepted" for e in _events(result, "log") if e.xid in limits.accept_xids
    )
    log = result.get("log")
    if isinstance(log, Mapping) and log.get("why"):
        yield f"stress: {log['why']}"


def _told(card: Mapping[str, Any], mine: Sequence[Sample]) -> Iterator[str]:
    hottest = max((sample.temperature for sample in mine if sample.temperature is not None), default=None)
    watts = max((sample.watts for sample in mine if sample.watts is not None), default=None)
    said = [f"{card.get('rounds')} rounds right"] if card.get("ok") else []
    said += [f"at most {hottest:.0f} °C"] if hottest is not None else []
    said += [f"{watts:.0f} W"] if watts is not None else []
    capped = sum(bool(sample.reasons & POWER_CAP) for sample in mine)
    said += [f"at its power cap in {capped} of {len(mine)} looks"] if capped else []
    counts = [sample.corrected for sample in mine if sample.corrected is not None]
    said += [f"{counts[-1] - counts[0]:.0f} corrected memory errors"] if counts and counts[-1] > counts[0] else []
    if said:
        yield f"stress: {label(card)}: {', '.join(said)}"
