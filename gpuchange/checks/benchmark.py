"""Is a host as fast as before? Compares two results of the GPU benchmark (`gpuchange_bench.bench_test`); pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

DEFAULT_TOLERANCE = 5.0
MOST_NOISE = 25.0
"""Percent. What scatters more than this cannot excuse a change by its own noise."""


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
    link: Mapping[str, Any] = {}
    why: str = ""

    @property
    def label(self) -> str:
        where = f"{self.uuid} at {self.pci}" if self.uuid and self.pci else self.uuid or self.pci
        return f"card {self.index} ({where})"


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
    "peer": Meaning("to the next card", "GB/s", True),
    "fp32": Meaning("FP32 multiply-add", "GFLOP/s", True),
    "launch": Meaning("kernel launch", "µs", False),
}


def compare(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    tolerance_percent: float = DEFAULT_TOLERANCE,
    floors: Mapping[str, float] | None = None,
) -> list[Finding]:
    """Every metric of every card measured before, with its pair afterwards: same UUID, else same PCI slot.

    A metric may get worse by `tolerance_percent`, or by its own spread before the change if that was larger (up to
    MOST_NOISE); a missing metric or card fails. `floors` bind every card; a new card, which has nothing of its own to
    be compared with, is held against them alone where there is one for the metric.
    """
    old, new, limits = cards(before), cards(after), floors or {}
    pairs = _pairs(old, new)
    found: list[Finding] = []
    for card in old:
        now = pairs.get(card.index)
        bound = limits if now and _is_new(card, now) else {}
        found += [
            _finding(card, now, name, metric, tolerance_percent)
            for name, metric in card.metrics.items()
            if name not in bound
        ]
    return found + [finding for card in new for finding in _against_floors(card, limits)]


def links(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[bool, str]]:
    """(fine, sentence) for each card's PCIe link under load: at least as before; a new card's as wide as it can be."""
    old, new = cards(before), cards(after)
    pairs = _pairs(old, new)
    replaced = {now.index: card for card in old if (now := pairs.get(card.index)) is not None}
    return [line for card in new for line in _link(replaced.get(card.index), card)]


def failed(findings: Iterable[Finding]) -> tuple[str, ...]:
    """The sentences of what got worse or is missing."""
    return tuple(finding.sentence for finding in findings if not finding.ok)


def change_percent(before: float, after: float, higher_is_better: bool) -> float:
    """Positive is better. Times are compared as rates, so that half as fast is -50 % either way."""
    if before <= 0 or after <= 0:
        return -100.0
    ratio = after / before if higher_is_better else before / after
    return 100.0 * (ratio - 1.0)


def judged(
    start: str, unit: str, before: Metric, after: Metric, better: bool, tolerance: float
) -> tuple[float, bool, str]:
    """(change in percent, fine, sentence) of one metric; `better`: higher is better."""
    change = change_percent(before.median, after.median, better)
    allowed = max(tolerance, min(100 * before.spread, MOST_NOISE))
    noise = f"noise {100 * before.spread:.2g}% and {100 * after.spread:.2g}%"
    words = f"{start} → {_value(after.median, unit)} ({change:+.1f}%, allowed -{allowed:g}%, {noise})"
    return change, change >= -allowed, words


def _value(number: float, unit: str) -> str:
    return f"{number:.6g} {unit}".rstrip()


def cards(result: Mapping[str, Any]) -> list[MeasuredCard]:
    """The cards of a result. One whose report cannot be read has no metrics, and says why."""
    rows = result.get("cards")
    return [_card(number, row) for number, row in enumerate(rows if isinstance(rows, list | tuple) else ())]


def _card(number: int, row: Any) -> MeasuredCard:
    try:
        return MeasuredCard.model_validate(row)
    except ValidationError as error:
        return MeasuredCard(index=number, why=f"its report cannot be read: {error.errors()[0]['msg']}")


def _is_new(old: MeasuredCard, now: MeasuredCard) -> bool:
    return bool(old.uuid and now.uuid and old.uuid != now.uuid)


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
    label = (now or card).label
    start = f"{label}: {meaning.title} {_value(metric.median, meaning.unit)}"
    pair = now.metrics.get(name) if now else None
    if pair is None:
        why = "card is missing" if now is None else f"not measured{': ' + now.why if now.why else ''}"
        return Finding(label, name, metric.median, None, None, False, f"{start} before, now {why}")
    change, ok, words = judged(start, meaning.unit, metric, pair, meaning.higher_is_better, tolerance_percent)
    return Finding(label, name, metric.median, pair.median, change, ok, words)


def _against_floors(card: MeasuredCard, floors: Mapping[str, float]) -> Iterator[Finding]:
    for name, floor in floors.items():
        if name == "peer" and card.metrics and name not in card.metrics:
            continue  # the only card of its host has no next one
        meaning, found = METRICS[name], card.metrics.get(name)
        word = "at least" if meaning.higher_is_better else "at most"
        asked = f"the plan asks for {word} {_value(floor, meaning.unit)}"
        if found is None:
            words = f"{card.label}: {meaning.title} not measured{': ' + card.why if card.why else ''}, {asked}"
            yield Finding(card.label, name, None, None, None, False, words)
            continue
        fine = found.median >= floor if meaning.higher_is_better else found.median <= floor
        words = f"{card.label}: {meaning.title} {_value(found.median, meaning.unit)}, {asked}"
        yield Finding(card.label, name, None, found.median, None, fine, words)


@dataclass(frozen=True)
class Link:
    """A PCIe link under load; 0 where the card does not tell."""

    gen: int = 0
    most_gen: int = 0
    width: int = 0
    most_width: int = 0

    def __str__(self) -> str:
        return f"Gen{self.gen} x{self.width}"


def link_of(card: MeasuredCard) -> Link:
    """What nvidia-smi said of this card among all (uuid, generation, its maximum, width, its maximum)."""
    for line in str(card.link.get("out") or "").splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 5 and cells[0] == card.uuid:
            return Link(
                *(int(cell) if cell.isascii() and cell.isdigit() and len(cell) < 4 else 0 for cell in cells[1:])
            )
    return Link()


def _link(old: MeasuredCard | None, card: MeasuredCard) -> Iterator[tuple[bool, str]]:
    now = link_of(card)
    was = link_of(old) if old else Link()
    same = old is not None and not _is_new(old, card) and was.gen and was.width
    wanted = was if same else Link(now.most_gen, now.most_gen, now.most_width, now.most_width)
    if now.gen and now.width:
        fine = now.gen >= wanted.gen and now.width >= wanted.width
        word = "was" if same else "it can do"
        yield fine, f"{card.label}: link {now} under load" + ("" if fine else f", {word} {wanted}")
    elif same:
        yield False, f"{card.label}: link under load was {was}, now nvidia-smi does not tell"
