"""A host's facts and a plan's wishes as a question for the resolver, and its answer in a preflight's words. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, date, datetime
from typing import Any

from gpuchange.checks.snapshot import Snapshot, mapping, rows
from gpuchange.compat.floors import compat_package
from gpuchange.compat.model import Answer, Finding, Question
from gpuchange.compat.resolver import Open, ranges
from gpuchange.compat.tables import Card, find_card

DISPLAY = ("0x0300", "0x0302")
LONG_AGO = date(1970, 1, 1)


def question(facts: Mapping[str, Any], picture: Snapshot, wish: Mapping[str, str]) -> Question:
    """What the plan wants where it says so, else what the host has. A cuDNN that is not wished for is not asked about:
    it goes on with the toolkit that it was installed for."""
    cuda = wish.get("cuda") or picture.cuda.active or ""
    return Question(
        today=_today(facts),
        cards=cards(facts, picture),
        machine=str(facts.get("arch") or "x86_64"),
        kernel=picture.kernel,
        distribution=_distribution(str(facts.get("os_release") or "")),
        secure_boot=facts["secure_boot"] if isinstance(facts.get("secure_boot"), bool) else None,
        nvswitch=bool(picture.switches),
        cuda_compat=compat_package(cuda) in picture.packages,
        driver=wish.get("driver") or picture.driver.userspace or picture.driver.loaded or "",
        module=_flavour(picture),
        cuda=cuda,
        cudnn=wish.get("cudnn", ""),
    )


def _today(facts: Mapping[str, Any]) -> date:
    """The host's own day: judging must not look at a clock."""
    epoch = mapping(facts.get("clock")).get("epoch")
    try:
        return datetime.fromtimestamp(float(epoch or 0), UTC).date()
    except (TypeError, ValueError, OverflowError, OSError):
        return LONG_AGO


def _distribution(text: str) -> str:
    found = re.search(r'^PRETTY_NAME="?([^"\n]*)', text, re.M)
    return found[1] if found else ""


def _flavour(picture: Snapshot) -> str:
    if picture.driver.open_module is None:
        return ""
    return "open" if picture.driver.open_module else "proprietary"


def cards(facts: Mapping[str, Any], picture: Snapshot) -> tuple[Card, ...]:
    """The kinds of card on the bus, by PCI id, else by the name that nvidia-smi gives for that slot."""
    names = {card.bus_id: card.name or "" for card in picture.cards}
    devices = [row for row in rows(facts.get("pci")) if str(row.get("class", "")).startswith(DISPLAY)]
    found = [_card(str(row.get("device", "")), names.get(str(row.get("address", "")).lower(), "")) for row in devices]
    found = found or [find_card(name) for name in names.values() if name]
    return tuple(dict.fromkeys(found))


def _card(device: str, name: str) -> Card:
    by_id = find_card(device)
    return by_id if by_id.cc or not name else find_card(name)


def against(found: Answer, wished: Collection[str]) -> tuple[Finding, ...]:
    """The refusals that the plan brings about: those whose rule looks at a part that it changes."""
    parts_of = set(wished) | ({"module"} if "driver" in wished else set())
    return tuple(row for row in found.of("refused") if parts_of.intersection(row.parts))


def worth_knowing(found: Answer, wished: Collection[str]) -> tuple[str, ...]:
    """Warnings, and what the tables do not say, about parts that the plan changes (and about unknown cards)."""
    kept = [row for row in found.findings if not row.parts or set(wished).intersection(row.parts)]
    unsaid = [f"not in the tables: {row.says}" for row in kept if row.outcome == "unknown"]
    return (*unsaid, *(row.says for row in kept if row.outcome == "warning"))


# ------------------------------------------------------------------------------- what the plan left open


def open_ranges(asked: Question, left_open: Collection[Open]) -> dict[str, list[list[str]]]:
    """{driver or cudnn: [[first, end], ...]}: the versions that are known to fit; the host picks its newest."""
    blank = replace(
        asked,
        driver="" if "driver" in left_open else asked.driver,
        cudnn="" if "cudnn" in left_open else asked.cudnn,
    )
    return {part: [list(pair) for pair in ranges(blank, part)] for part in left_open}


# -------------------------------------------------------------------------------- what preflight has chosen


def chosen_question(asked: Question, after: Mapping[str, str], install: Mapping[str, str]) -> Question:
    """The question once the packages are known: their versions, their module's flavour, their fabric manager."""
    fabric = [version for name, version in install.items() if name.startswith("nvidia-fabricmanager")]
    return replace(
        asked,
        driver=after.get("driver") or asked.driver,
        cuda=after.get("cuda") or asked.cuda,
        cudnn=after.get("cudnn") or asked.cudnn,
        module=flavour_of(install) or asked.module,
        fabric_manager=_upstream(fabric[0]) if fabric else "",
    )


MODULE_PACKAGE = r"nvidia-(dkms|kernel-(source|dkms|open)|open)\b|linux-.*-nvidia|a?kmod-nvidia\b"


def flavour_of(install: Iterable[str]) -> str:
    """The module's flavour by its package's name; "" when no module package is among them."""
    modules = [name for name in install if re.match(MODULE_PACKAGE, name)]
    if not modules:
        return ""
    return "open" if any("open" in name for name in modules) else "proprietary"


def _upstream(version: str) -> str:
    return version.rpartition(":")[2].rpartition("-")[0] or version
