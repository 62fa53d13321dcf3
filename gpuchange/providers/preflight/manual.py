"""preflight/manual: which card the plan means on this host, and who names it by UUID. Changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuchange.checks import card_swap, references
from gpuchange.checks.card_swap import Resolved
from gpuchange.checks.snapshot import rows
from gpuchange.providers.change.manual import CardReport, entries
from gpuchange.providers.contract import HostView, Mode, Params, Provider
from gpuchange.reports import Verdict, by_state


class ManualPreflight(Params):
    """Brought along by `change: [{provider: manual}]`."""


def planned(view: HostView) -> Mapping[str, Any]:
    """The parameters of change/manual in the plan."""
    return next((row for row in rows(view.plan.get("change")) if row.get("provider") == "manual"), {})


def args(view: HostView, _mode: Mode) -> dict[str, Any]:
    more = list(planned(view).get("references") or ())
    return {"goal": [], "confirmed": True, "references": more, "knock": {}, "arrived": arrived(view)}


def arrived(view: HostView) -> list[str] | None:
    """The cards whose presence means that nothing is left to do on this host; None when the plan does not say which."""
    coming = [card_swap.Comes.model_validate(row.get("comes") or {}) for row in entries(view, planned(view))]
    known = [card.serial or card.uuid for card in coming]
    return [name for name in known if name] if all(known) else None


def meant(view: HostView, report: CardReport) -> Resolved:
    picture = report.picture
    return card_swap.resolve(entries(view, planned(view)), picture.smi, picture.pci)


def judge(view: HostView, report: CardReport) -> Verdict:
    if report.state not in ("done", "not_done"):
        return by_state(report)
    found = meant(view, report)
    if found.problems:
        return Verdict.reject("; ".join(found.problems))
    return Verdict.accept(findings=said(view, report))


def said(view: HostView, report: CardReport) -> tuple[str, ...]:
    """What would be done by hand, and which files name the cards that go."""
    found = meant(view, report)
    going = [swap.goes.uuid for swap in found.swaps if swap.goes and swap.goes.uuid]
    named = references.to_cards(references.parse(list(report.references)), going)
    dead = references.stale(references.parse(list(report.references)), [c.uuid for c in report.picture.cards if c.uuid])
    by_hand = "by hands, powered off; reversible by hands: going back asks for the old card"
    return (
        *(f"{swap} ({by_hand})" for swap in found.swaps),
        *(f"slot {swap.slot}: {swap.comes} is there already" for swap in found.in_place),
        *references.sentences(named, "the card that goes is named in"),
        *references.sentences(dead, "names no card of this host:"),
    )


PROVIDER = Provider(
    phase="preflight",
    name="manual",
    does="Find the cards that the plan means, and the configuration that names them by UUID.",
    params=ManualPreflight,
    report=CardReport,
    args=args,
    judge=judge,
    preview=said,
    root_for="to read configuration that names cards",
    binaries=("nvidia-smi",),
    estimate_s=3.0,
)
