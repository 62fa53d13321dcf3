"""Rules about driver, module flavour, CUDA and cards. Each takes a question and says nothing when it does not apply."""

from __future__ import annotations

from calendar import monthrange
from collections.abc import Iterator
from datetime import date

from gpuchange.compat.model import Question, Said
from gpuchange.compat.tables import (
    Card,
    Row,
    branch,
    first_release,
    floor_row,
    full_row,
    known_branches,
    rows,
    source_of,
    tables,
)
from gpuchange.compat.versions import compare, parts, release

CHECK_OR_NAME = "check NVIDIA's page, or take a version that the tables have"


def driver_known(q: Question) -> Iterator[Said]:
    if not q.driver:
        return
    number, known = branch(q.driver), known_branches()
    if number in known:
        yield Said("fits", f"driver branch R{number} is known")
    else:
        newest = f"the newest that they have is R{max(known)}"
        yield Said("unknown", f"driver branch R{number} is not in the tables: {newest}", CHECK_OR_NAME)


def driver_end_of_life(q: Question) -> Iterator[Said]:
    row = known_branches().get(branch(q.driver)) if q.driver else None
    if not row:
        return
    name = f"driver branch R{row['branch']} ({row['type']})"
    if not row["eol"]:
        yield Said("warning", f"driver branch R{row['branch']} has reached its end of life", _living(q.today))
    elif last_day(row["eol"]) < q.today:
        yield Said("warning", f"{name} reached its end of life in {row['eol']}", _living(q.today))
    else:
        yield Said("fits", f"{name} is supported until {row['eol']}")


def last_day(month: str) -> date:
    """2026-02 → 28 February 2026."""
    year, number = (int(part) for part in month.split("-"))
    return date(year, number, monthrange(year, number)[1])


def _living(today: date) -> str:
    alive = [row for row in rows("driver_branches") if row["eol"] and last_day(row["eol"]) >= today]
    named = ", ".join(f"R{row['branch']} (until {row['eol']})" for row in alive)
    return f"supported branches: {named}" if named else ""


def cuda_known(q: Question) -> Iterator[Said]:
    if not q.cuda:
        return
    if full_row(q.cuda):
        yield Said("fits", f"CUDA {release(q.cuda)} is known")
    else:
        yield Said("unknown", f"CUDA {q.cuda} is not in the tables", CHECK_OR_NAME)


def card_known(q: Question) -> Iterator[Said]:
    for card in q.cards:
        if not card.cc:
            yield Said("unknown", f"card {card.name} is not in the tables", "name its compute capability: --gpu 9.0")
        elif card.architecture is None:
            yield Said("unknown", f"compute capability {card.cc} is not in the architectures' table", CHECK_OR_NAME)
        else:
            yield Said("fits", f"{card} is known", source=source_of("architectures", card.architecture))


# --------------------------------------------------------------------------------------- CUDA and driver


def cuda_driver_floor(q: Question) -> Iterator[Said]:
    found = floor_row(q.cuda) if q.driver and q.cuda else None
    if not found:
        return
    floor, row, table = found
    source = source_of(table, row)
    if compare(q.driver, floor) >= 0:
        yield Said("fits", f"toolkit {q.cuda} needs driver {floor} or newer: {q.driver} is", source=source)
    elif q.cuda_compat and all(card.data_center for card in q.cards):
        words = f"driver {q.driver} runs CUDA {q.cuda} through the forward compatibility package only"
        yield Said("warning", words, "", source_of("forward_compatibility"))
    else:
        words = f"toolkit {q.cuda} needs driver {floor} or newer, not {q.driver}"
        yield Said("refused", words, f"take driver {floor} or newer, or an older CUDA", source)


def cuda_driver_full(q: Question) -> Iterator[Said]:
    row = full_row(q.cuda) if q.driver and q.cuda else None
    found = floor_row(q.cuda) if row else None
    if not row or (found and compare(q.driver, found[0]) < 0):
        return
    came_with = str(row.get("driver") or row["branch"])
    table = "toolkit_driver" if "driver" in row else "toolkit_branch"
    if compare(q.driver, came_with) < 0:
        words = f"driver {q.driver} runs CUDA {q.cuda} in minor-version compatibility; all of it from {came_with} on"
        yield Said("warning", words, f"driver {came_with} or newer has every feature", source_of(table, row))


# ------------------------------------------------------------------------------------- cards and software


def _architectures(q: Question) -> Iterator[tuple[Card, Row]]:
    for card in q.cards:
        if card.architecture:
            yield card, card.architecture


def card_dropped_by_driver(q: Question) -> Iterator[Said]:
    for card, row in _architectures(q) if q.driver else ():
        last = row["last_branch"]
        if last and branch(q.driver) > last:
            words = f"driver {q.driver} does not drive {card}: R{last} is the last branch for {row['arch']}"
            yield Said("refused", words, f"stay at or below R{last}", source_of("architectures", row))
        elif last:
            yield Said("fits", f"R{last} is the last branch for {card}", source=source_of("architectures", row))


def card_newer_than_driver(q: Question) -> Iterator[Said]:
    for card, row in _architectures(q) if q.driver else ():
        first = row["first_branch"]
        if first and branch(q.driver) < first:
            words = f"driver {q.driver} does not know {card}: R{first} is the first branch for it"
            yield Said("refused", words, f"take a driver of R{first} or newer", source_of("architectures", row))
        elif first:
            yield Said("fits", f"R{first} is the first branch for {card}", source=source_of("architectures", row))


def card_dropped_by_cuda(q: Question) -> Iterator[Said]:
    for card, row in _architectures(q) if q.cuda else ():
        last = row["last_cuda"]
        if last and parts(q.cuda)[:2] > parts(last.replace("x", "999")):
            words = f"CUDA {q.cuda} has dropped {card}: {last} is the last for {row['arch']}"
            yield Said("refused", words, f"stay at or below CUDA {last}", source_of("architectures", row))
        elif last:
            yield Said("fits", f"CUDA {last} is the last for {card}", source=source_of("architectures", row))


def card_newer_than_cuda(q: Question) -> Iterator[Said]:
    for card, row in _architectures(q) if q.cuda else ():
        first = row["first_cuda"]
        if parts(release(q.cuda)) < parts(first):
            words = f"CUDA {q.cuda} does not know {card}: {first} is the first for {row['arch']}"
            yield Said("refused", words, f"take CUDA {first} or newer", source_of("architectures", row))
        else:
            yield Said("fits", f"CUDA {first} is the first for {card}", source=source_of("architectures", row))


def cuda_codegen(q: Question) -> Iterator[Said]:
    """Between an architecture's first CUDA and its own one, a card runs code of its architecture's older member."""
    for card, row in _architectures(q) if q.cuda else ():
        first = first_release(card)
        if first and parts(row["first_cuda"]) <= parts(release(q.cuda)) < parts(first):
            words = f"CUDA {q.cuda} makes no code for {card} itself; CUDA {first} is the first that does"
            yield Said("warning", words, f"take CUDA {first} or newer")


# -------------------------------------------------------------------------------------- module flavour


def needed_flavour(card: Card) -> str:
    """open, proprietary, or "" where both work (or the card is not known)."""
    row = _flavour(card)
    if card.grace:
        return "open"
    return str(row["flavour"]) if row and row["required"] else ""


def _flavour(card: Card) -> Row | None:
    arch = card.architecture
    return next((row for row in rows("module_flavour") if arch and row["arch"] == arch["arch"]), None)


def mixed_flavours(q: Question) -> Iterator[Said]:
    needs = {flavour: card for card in q.cards if (flavour := needed_flavour(card))}
    if len(needs) > 1:
        words = f"no one module drives {needs['open']}, open only, and {needs['proprietary']}, proprietary only"
        yield Said("refused", words, "put these cards into different hosts")


def module_flavour(q: Question) -> Iterator[Said]:
    for card in q.cards:
        need, label = needed_flavour(card), f"driver {q.driver} {q.module}" if q.driver else f"the {q.module} module"
        if not q.module:
            if need:
                yield Said("note", f"{card} needs the {need} kernel module")
        elif need and need != q.module:
            yield Said("refused", f"{label} does not drive {card}", f"use the {need} flavour")
        elif _flavour(card):
            yield Said("fits", f"{label} drives {card}")


def open_module_branch(q: Question) -> Iterator[Said]:
    first = int(tables()["module_flavour"]["first_open_branch"])
    if q.module == "open" and q.driver and branch(q.driver) < first:
        words = f"driver {q.driver} has no open kernel modules: they begin with R{first}"
        yield Said("refused", words, f"take a driver of R{first} or newer, or the proprietary flavour")


# ----------------------------------------------------------------------------- equal parts and the host


def fabric_manager_equal(q: Question) -> Iterator[Said]:
    if q.nvswitch is False and q.fabric_manager:
        yield Said("note", "no NVSwitch on this host: fabric manager not required")
    elif q.fabric_manager and q.driver:
        words = f"fabric manager {q.fabric_manager}, driver {q.driver}"
        if parts(q.fabric_manager) == parts(q.driver):
            yield Said("fits", f"{words}: equal")
        else:
            remedy = f"take fabric manager {q.driver}, or driver {q.fabric_manager}"
            yield Said("refused", f"{words}: it does not start unless the versions are equal", remedy)
    elif q.nvswitch and q.driver:
        yield Said("note", f"NVSwitch present: the fabric manager must be exactly {q.driver}")


def libraries_equal(q: Question) -> Iterator[Said]:
    if not (q.libraries and q.driver):
        return
    words = f"driver libraries {q.libraries}, kernel module {q.driver}"
    if parts(q.libraries) == parts(q.driver):
        yield Said("fits", f"{words}: equal")
    else:
        yield Said(
            "refused", f"{words}: every call would fail with a version mismatch", "install both from one version"
        )


def kernel_range(q: Question) -> Iterator[Said]:
    if not q.kernel or not parts(q.kernel):
        return
    oldest = str(rows("kernel")[0]["min_kernel"])
    if compare(release(q.kernel), oldest) < 0:
        yield Said("refused", f"kernel {q.kernel} is older than {oldest}, the oldest that the driver supports")
    else:
        where = f" ({q.distribution})" if q.distribution else ""
        words = f"kernel {q.kernel}{where}: no newest kernel is published; the module's build for it is the proof"
        yield Said("note", words)


def secure_boot(q: Question) -> Iterator[Said]:
    if q.secure_boot:
        yield Said("warning", "Secure Boot is on: a module built here loads only if its signing key is enrolled")
