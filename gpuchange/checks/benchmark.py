"""Is a host as fast as before? Compares two results of the GPU benchmark (`gpuchange_cuda.bench_test`); pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict


class Metric(BaseModel):
    """Median of `samples`; `spread` is (largest - smallest) / median."""

    model_config = ConfigDict(frozen=True)

    median: float
    spread: float = 0.0
    samples: int = 0


class MeasuredCard(BaseModel):
    model_config = ConfigDict(frozen=True)

    index: int
    uuid: str = ""
    pci: str = ""
    name: str = ""
    metrics: Mapping[str, Metric] = {}
    why: str = ""


@dataclass(frozen=True)
class Finding:
    """One metric of one card, compared. `change_percent` is positive for better; None when there is no pair."""

    card: str
    metric: str
    before: float | None
    after: float | None
    change_percent: float | None
    ok: bool
    sentence: str


@dataclass(frozen=True)
class Meaning:
    title: str
    unit: str
    higher_is_better: bool


METRICS: dict[str, Meaning] = {
    "h2d": Meaning("host to device", "GB/s", True),
    "d2h": Meaning("device to host", "GB/s", True),
    "d2d": Meaning("within the device", "GB/s", True),
    "launch": Meaning("kernel launch", "µs", False),
}


def compare(before: Mapping[str, Any], after: Mapping[str, Any], tolerance_percent: float) -> list[Finding]:
    """Every metric of every card measured before, with its pair afterwards: same UUID, else same PCI slot.

    A metric may get worse by `tolerance_percent`, or by its own spread before the change if that was larger; a
    missing metric or card fails. Cards that are only there afterwards have nothing to be compared with.
    """
    old, new = _cards(before), _cards(after)
    pairs = _pairs(old, new)
    return [
        _finding(card, pairs.get(card.index), name, metric, tolerance_percent)
        for card in old
        for name, metric in card.metrics.items()
    ]


def failed(findings: Iterable[Finding]) -> tuple[str, ...]:
    """The sentences of what got worse or is missing."""
    return tuple(finding.sentence for finding in findings if not finding.ok)


def _cards(result: Mapping[str, Any]) -> list[MeasuredCard]:
    return [MeasuredCard.model_validate(card) for card in result.get("cards", ())]


def _pairs(old: Sequence[MeasuredCard], new: Sequence[MeasuredCard]) -> dict[int, MeasuredCard]:
    """Old card's index to its new card. UUIDs first, so that cards that swapped slots are not mixed up."""
    by_uuid = {card.uuid: card for card in new if card.uuid}
    pairs = {card.index: by_uuid[card.uuid] for card in old if card.uuid in by_uuid}
    taken = {card.index for card in pairs.values()}
    by_slot = {card.pci: card for card in new if card.pci and card.index not in taken}
    return pairs | {c.index: by_slot[c.pci] for c in old if c.index not in pairs and c.pci in by_slot}


def _finding(
    card: MeasuredCard, now: MeasuredCard | None, name: str, metric: Metric, tolerance_percent: float
) -> Finding:
    meaning = METRICS.get(name, Meaning(name, "", True))
    label = f"card {card.index} ({card.uuid or card.pci})"
    start = f"{label}: {meaning.title} {metric.median:g} {meaning.unit}"
    pair = now.metrics.get(name) if now else None
    if pair is None:
        why = "card is missing" if now is None else f"not measured{': ' + now.why if now.why else ''}"
        return Finding(label, name, metric.median, None, None, False, f"{start} before, now {why}")
    change = _change_percent(metric.median, pair.median, meaning.higher_is_better)
    allowed = max(tolerance_percent, 100 * metric.spread)
    ok = change >= -allowed
    words = f"{start} → {pair.median:g} {meaning.unit} ({change:+.1f}%, allowed -{allowed:g}%)"
    return Finding(label, name, metric.median, pair.median, change, ok, words)


def _change_percent(before: float, after: float, higher_is_better: bool) -> float:
    """Positive is better. Times are compared as rates, so that half as fast is -50 % either way."""
    if before <= 0 or after <= 0:
        return -100.0
    ratio = after / before if higher_is_better else before / after
    return 100.0 * (ratio - 1.0)
