"""nvidia-smi's texts: its words for a missing value and for a sick card; CSV, `-L`, `mig -lgi`, the table. Pure."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from typing import NamedTuple

from gpuchange.checks.slots import bus_id

ABSENT = frozenset(
    {
        "", "N/A", "NOT SUPPORTED", "NOT AVAILABLE", "NOT FOUND", "NONE FOUND", "FUNCTION NOT FOUND", "NO DATA",
        "INSUFFICIENT PERMISSIONS", "REQUESTED FUNCTIONALITY HAS BEEN DEPRECATED", "UNKNOWN", "INVALID ARGUMENT",
    }
)  # fmt: skip
"""What stands in place of a value that there is not; in CSV in brackets."""

SICK = {
    "GPU IS LOST": "GPU is lost",
    "GPU REQUIRES RESET": "GPU requires reset",
    "UNKNOWN ERROR": "Unknown Error",
    "ERR!": "ERR!",
    "GPU ACCESS BLOCKED BY THE OPERATING SYSTEM": "GPU access blocked by the operating system",
}
"""What stands in place of a value when the card does not answer, though the card is listed and the exit code is 0."""


def bare(text: str) -> str:
    """Without the brackets that CSV puts around what is no value."""
    word = text.strip()
    return word[1:-1].strip() if word.startswith("[") and word.endswith("]") else word


def value(text: str | None) -> str | None:
    """The text of a value; None where nvidia-smi says that there is none, or that it cannot be had."""
    word = bare(text or "")
    return None if word.upper() in ABSENT or sickness(word) else word


def sickness(text: str) -> str:
    """Why a card is not well when this stands in place of a value; else ''."""
    return SICK.get(bare(text).upper().rstrip("."), "")


def number(text: str | None) -> float | None:
    """`700.00 W`, `81559 MiB`, `0 %`, `31`: the number. None when there is none."""
    found = re.fullmatch(r"(-?[0-9]{1,15}(?:\.[0-9]{1,6})?)(?: ?[A-Za-z%/]{1,8})?", value(text) or "")
    return float(found[1]) if found else None


def csv_rows(text: str, width: int) -> list[list[str]]:
    """Rows of `--format=csv` with `width` fields; headings and complaints between them are left out.

    Raises csv.Error on what no CSV is. A name with a comma in it spoils its row: ask for none.
    """
    rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines())]
    return [row for row in rows if len(row) == width]


# ---------------------------------------------------------------------------------------------- nvidia-smi -L


class Instance(NamedTuple):
    """A MIG device: `profile` as in 1g.10gb or 1c.3g.40gb, `uuid` in its old or new form."""

    profile: str
    uuid: str


class Listed(NamedTuple):
    name: str
    uuid: str
    mig: tuple[Instance, ...] = ()


_GPU_LINE = re.compile(r"GPU \d{1,4}: ([^\n]{0,200}?) \(UUID: ([^\s()]{1,80})\)")
_MIG_LINE = re.compile(r"\s+MIG (\S{1,40})\s+Device\s+\d{1,3}: \(UUID: ([^\s()]{1,120})\)")


def listing(text: str) -> tuple[Listed, ...]:
    """The cards of `nvidia-smi -L`, each with the MIG devices that are indented below it."""
    cards: list[Listed] = []
    for line in text.splitlines():
        card, device = _GPU_LINE.match(line), _MIG_LINE.match(line)
        if card:
            cards.append(Listed(card[1], card[2]))
        elif device and cards:
            cards[-1] = cards[-1]._replace(mig=(*cards[-1].mig, Instance(device[1], device[2])))
    return tuple(cards)


# -------------------------------------------------------------------------------------- nvidia-smi mig -lgi


class Placed(NamedTuple):
    """A GPU instance: on which card (its index), of which profile, and which memory slices it takes."""

    gpu: int
    profile: str
    profile_id: int
    instance: int
    start: int
    size: int


_PLACED = re.compile(r"\|\s+(\d{1,4})\s+MIG (\S{1,40})\s+(\d{1,4})\s+(\d{1,4})\s+(\d{1,3}):(\d{1,3})\s+\|")


def gpu_instances(text: str) -> tuple[Placed, ...]:
    """The rows of `nvidia-smi mig -lgi`."""
    rows = (_PLACED.match(line.strip()) for line in text.splitlines())
    found = [row.groups() for row in rows if row]
    return tuple(Placed(int(row[0]), row[1], *(int(part) for part in row[2:])) for row in found)


# ----------------------------------------------------------------------------------------------- the table


class TableCard(NamedTuple):
    """One card of the table. `name` may be cut short ("NVIDIA A100-SXM..."); `sick` is where ERR! stands."""

    bus_id: str
    name: str
    persistence: str | None
    memory: str | None
    mig_mode: str | None
    sick: bool


class Table(NamedTuple):
    """The plain `nvidia-smi`: `cuda` is the newest CUDA that the driver can carry, no toolkit."""

    driver: str | None
    cuda: str | None
    cards: tuple[TableCard, ...]


_DRIVER = re.compile(r"(?:Driver|KMD) Version: (\d[\d.]{0,30})")
_CUDA = re.compile(r"CUDA(?: UMD)? Version: (\d[\d.]{0,30})")
_CARD = re.compile(
    r"\|\s{1,4}\d{1,4}  (\S.{0,60}?)\s{1,40}(On|Off|N/A|ERR!)\s{0,4}\|\s{1,6}"
    r"([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])\s"
)
_MEMORY = re.compile(r"/\s{0,8}(\d{1,9})MiB")
_MODE = re.compile(r"\s(Enabled|Disabled)\*?\s{0,4}\|$")


def table(text: str) -> Table:
    """What the table says, of any driver from 470 on. Empty where the text is none."""
    lines = [line.strip()[:300] for line in text.splitlines()]
    head = "\n".join(lines[:8])
    driver, cuda = _DRIVER.search(head), _CUDA.search(head)
    starts = [number for number, line in enumerate(lines) if _CARD.match(line)]
    cards = [_table_card(lines[start : start + 3]) for start in starts]
    return Table(driver[1] if driver else None, cuda[1] if cuda else None, tuple(cards))


def _table_card(lines: Sequence[str]) -> TableCard:
    found, rest = _CARD.match(lines[0]), [line for line in lines[1:] if line.startswith("|")]
    assert found
    memory = next((match[1] for line in rest if (match := _MEMORY.search(line))), None)
    mode = next((match[1] for line in rest if (match := _MODE.search(line))), None)
    return TableCard(
        bus_id=bus_id(found[3]),
        name=found[1],
        persistence={"On": "Enabled", "Off": "Disabled"}.get(found[2]),
        memory=f"{memory} MiB" if memory else None,
        mig_mode=mode,
        sick=any("ERR!" in line for line in (lines[0], *rest)),
    )
