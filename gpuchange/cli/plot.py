"""Bars of what was measured before and after, as inline SVG: no script, nothing from outside, all escaped. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape

from gpuchange.checks.benchmark import METRICS, Finding, Meaning

WIDTH, BAR, GAP = 760, 11, 12
NAMES, NUMBERS = 270, 190
SCALE = WIDTH - NAMES - NUMBERS
"""Pixels; the longer bar of a pair is SCALE wide."""

BEFORE, AFTER, FAILED = "#8a8f98", "#2f6fb3", "#c0392b"
TITLE = "grey: before; blue: after; red: after, and not good enough. The longer bar of each pair is the larger number."


def chart(findings: Sequence[Finding], clean: Callable[[str], str] = str) -> str:
    """Two bars a finding that has numbers; "" when none has. `clean` takes control characters out of texts."""
    rows = [row for row in findings if row.before is not None or row.after is not None]
    if not rows:
        return ""
    pitch = 2 * BAR + GAP
    drawn = [line for number, row in enumerate(rows) for line in _row(row, GAP + number * pitch, clean)]
    height = GAP + len(rows) * pitch
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" font-family="system-ui, sans-serif" font-size="11"><title>{escape(TITLE)}</title>'
    )
    return "\n".join((head, *drawn, "</svg>"))


def _row(row: Finding, top: int, clean: Callable[[str], str]) -> Iterator[str]:
    meaning = METRICS.get(row.metric, Meaning(row.metric, "", True))
    most = max(abs(row.before or 0.0), abs(row.after or 0.0)) or 1.0
    yield _text(0, top + BAR - 1, clean(meaning.title))
    yield _text(0, top + 2 * BAR - 1, clean(_short(row.card)), "#666")
    bars = ((row.before, BEFORE, ""), (row.after, AFTER if row.ok else FAILED, _change(row)))
    for number, (value, colour, more) in enumerate(bars):
        at = top + number * BAR
        if value is None:
            yield _text(NAMES, at + BAR - 2, "not measured", "#666")
            continue
        wide = max(1.0, SCALE * abs(value) / most)
        yield f'<rect x="{NAMES}" y="{at}" width="{wide:.1f}" height="{BAR - 1}" fill="{colour}"/>'
        yield _text(NAMES + wide + 5, at + BAR - 2, f"{value:.6g} {meaning.unit}{more}".strip())


def _change(row: Finding) -> str:
    return f" ({row.change_percent:+.1f}%)" if row.change_percent is not None else ""


def _short(card: str) -> str:
    """The label without the middle of a UUID: the whole one stands in the findings."""
    return card if len(card) <= 48 else f"{card[:22]}…{card[-20:]}"


def _text(x: float, y: float, text: str, colour: str = "#222") -> str:
    return f'<text x="{x:.1f}" y="{y}" fill="{colour}">{escape(text)}</text>'
