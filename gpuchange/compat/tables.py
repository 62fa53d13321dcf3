"""The published tables (tables.json, each with its source) and look-ups in them. Nothing is decided here."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from gpuchange.compat.versions import Key, compare, parts, release

Row = dict[str, Any]


@cache
def tables() -> dict[str, Any]:
    """All tables: {name: {source, rows, ...}}."""
    found = dict(json.loads(files("gpuchange.compat").joinpath("tables.json").read_text("utf-8")))
    return {name: table for name, table in found.items() if isinstance(table, dict)}


def rows(name: str) -> list[Row]:
    return list(tables()[name]["rows"])


def source_of(name: str, row: Row | None = None) -> str:
    """Where a table was read; a row that came from elsewhere names its own source."""
    return str((row or {}).get("source") or tables()[name]["source"])


# ------------------------------------------------------------------------------------------------ cards


@dataclass(frozen=True)
class Card:
    """One kind of card. `name` as the operator or the host says it; `cc` is its compute capability, "" if unknown."""

    name: str
    cc: str = ""
    data_center: bool = False
    grace: bool = False

    @property
    def architecture(self) -> Row | None:
        """Its row of the architectures' table."""
        return next((row for row in rows("architectures") if self.cc in row["cc"]), None)

    def __str__(self) -> str:
        arch = self.architecture
        inside = ", ".join(part for part in (arch["arch"] if arch else "", self.cc and f"cc {self.cc}") if part)
        return f"{self.name} ({inside})" if inside else self.name


_NOISE = re.compile(r"\b(nvidia|tesla|graphics|device|gpu|generation|pcie|sxm\d?)\b|[(),]", re.I)


def find_card(text: str) -> Card:
    """The card that `text` names: a compute capability (9.0), a PCI id (2330, 10de:2330, 0x2330) or a name.

    A name is the longest card of the table that occurs in it as whole words: `NVIDIA H100 80GB HBM3` is an H100.
    A card that no table has comes back without a compute capability.
    """
    word = text.strip().lower()
    if re.fullmatch(r"\d{1,2}\.\d", word):
        return Card(word, word)
    row = _by_id(word) or _by_name(word)
    if row is None:
        return Card(text.strip())
    return Card(str(row["card"]), str(row["cc"]), bool(row["data_center"]), bool(row.get("grace")))


def _by_id(word: str) -> Row | None:
    found = re.fullmatch(r"(?:10de:|0x)?([0-9a-f]{4})", word)
    return next((row for row in rows("cards") if found and found[1] in row["pci"]), None)


def _by_name(word: str) -> Row | None:
    """`Quadro` tells two cards apart (RTX 6000, RTX 6000 Ada); `GeForce` tells none, and is often left out."""
    said = f" {_plain(word)} "
    fitting = [(_plain(row["card"]), row) for row in rows("cards")]
    fitting = [(name, row) for name, row in fitting if f" {name} " in said]
    return max(fitting, key=lambda pair: len(pair[0]))[1] if fitting else None


def _plain(text: str) -> str:
    return " ".join(_NOISE.sub(" ", text.lower().replace("-", " ")).replace("geforce", "").split())


# ----------------------------------------------------------------------------------------- drivers, CUDA


def branch(driver: str) -> int:
    """580.95.05 → 580."""
    return parts(driver)[0]


@cache
def known_branches() -> dict[int, Row]:
    """Every driver branch that any table knows → its row of the branches' table, or {}."""
    found: dict[int, Row] = {int(row["branch"]): {} for row in rows("toolkit_branch")}
    found |= {branch(row["driver"]): {} for row in rows("toolkit_driver")}
    found |= {row["last_branch"]: {} for row in rows("architectures") if row["last_branch"]}
    return found | {int(row["branch"]): row for row in rows("driver_branches")}


def covers(pattern: str, cuda: str) -> bool:
    """Whether `12.x`, or `12.8`, covers the CUDA version."""
    head = tuple(int(part) for part in pattern.split(".") if part.isdigit())
    return parts(cuda)[: len(head)] == head


def floor_row(cuda: str) -> tuple[str, Row, str] | None:
    """(oldest driver on which programs of this CUDA start, its row, its table); None when no table knows it.

    From CUDA 11 on one floor holds for the whole major; before, each release needs the driver that it came with.
    """
    for row in rows("cuda_driver_floor"):
        if covers(row["cuda"], cuda):
            return str(row["min_driver"]), row, "cuda_driver_floor"
    row = full_row(cuda) or {}
    return (str(row["driver"]), row, "toolkit_driver") if "driver" in row else None


def full_row(cuda: str) -> Row | None:
    """The toolkit's row with the oldest driver that came with it; {branch} where only the branch is published."""
    key = parts(cuda)
    fitting = [row for row in rows("toolkit_driver") if key and parts(row["cuda"])[: len(key)] == key]
    if not fitting:  # an update that is not listed is held against its release
        fitting = [row for row in rows("toolkit_driver") if key[:2] and parts(row["cuda"])[:2] == key[:2]]
    if fitting:
        return min(fitting, key=lambda row: parts(row["driver"]))
    return next((row for row in rows("toolkit_branch") if covers(row["cuda"], release(cuda))), None)


def first_release(card: Card) -> str:
    """The CUDA release that can first make code for exactly this compute capability; "" when no table says."""
    found = [row["cuda"] for row in rows("codegen") if card.cc in row.get("adds", ())]
    return str(found[0]) if found else ""


# ------------------------------------------------------------------------------------------------- cuDNN


def cudnn_rows(cudnn: str) -> list[Row]:
    """The matrices' rows for exactly this cuDNN version."""
    return [row for row in rows("cudnn") if within(row["cudnn"], cudnn)]


def within(span: list[str], version: str) -> bool:
    """Whether the version lies in [first, last], releases of `last` included: 7.6.5.32 is in [7.6, 7.6]."""
    last = parts(span[1])
    return compare(version, span[0]) >= 0 and parts(version)[: len(last)] <= last


def matrices(cuda: str) -> dict[Key, list[Row]]:
    """{cuDNN minor release: its matrix's rows for the major of `cuda`}; for every major if "" is given."""
    found: dict[Key, list[Row]] = {}
    for row in rows("cudnn"):
        if row.get("supported", True) and (not cuda or row_major(row) == parts(cuda)[0]):
            found.setdefault(parts(row["cudnn"][0])[:2], []).append(row)
    return found


def row_major(row: Row) -> int:
    return parts(row["cuda"][0])[0]
