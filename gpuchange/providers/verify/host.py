"""verify/host: identity, versions by every witness, files and GPU function, against the seal and the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from gpuchange.checks import card_settings, consistency, containers, fabric, gpu_function, identity, snapshot, wanted
from gpuchange.checks import manifest as manifests
from gpuchange.checks.cards import Card
from gpuchange.checks.snapshot import Snapshot, mapping
from gpuchange.providers.contract import HostView, Mode, Provider
from gpuchange.providers.facts import (
    SEAL,
    FactsReport,
    base_args,
    card_goal,
    evidence,
    manifest_args,
    sealed,
)
from gpuchange.providers.facts import wanted as wanted_versions
from gpuchange.providers.types import Duration, Short
from gpuchange.providers.verify.gpu import SpeedParams
from gpuchange.providers.verify.peer import PeerParams
from gpuchange.reports import Verdict, by_state

LOOK_AGAIN_S = 10.0


class VerifyParams(SpeedParams):
    """What must hold before the host serves again."""

    settle: Duration = Field(60, description="How long services and cards may take to come up after the change.")
    container_image: str | None = Field(
        None, description="An image that is on the host: a fresh container of it must see the GPUs as well."
    )
    hashes: bool = Field(True, description="Compare the hash manifest with the seal's.")
    card_settings: Literal["hold", "report", "restore"] = Field(
        "hold",
        description="MIG, ECC, persistence, power limit or clocks not as before: hold the host, only say so, or set "
        "again what can be set (MIG devices, persistence, power limit; in a rollback too) and hold what is left.",
    )
    peer: Annotated[PeerParams, Short("hosts")] | None = Field(
        None, description="Sum and train together with this host before the host serves again; left out: no such test."
    )


def args(view: HostView, _mode: Mode) -> dict[str, Any]:
    name = "seal" if evidence(view, SEAL) else "record"
    kept = manifests.parse(sealed(view).get("manifest")) if view.params.get("hashes", True) else None
    return {
        **base_args(view),
        "function": True,
        "card_settings": card_goal(view),
        "container_image": view.params.get("container_image") or "",
        "manifest": manifest_args(view, "verify", name, kept.jsonl_sha256) if kept else None,
    }


def _changes(view: HostView) -> list[tuple[Provider, HostView]]:
    """The plan's change providers, each with the view of its own parameters."""
    from gpuchange import providers  # the registry imports this module

    chosen = view.plan.get("change")
    entries = [mapping(row) for row in chosen] if isinstance(chosen, list | tuple) else []
    found = [(providers.find("change", str(row.get("provider"))), replace(view, params=row)) for row in entries]
    return [(provider, own) for provider, own in found if provider]


def may_change(view: HostView) -> frozenset[str]:
    """What of the machine's identity the plan's change providers declare that they move."""
    return frozenset(what for provider, _ in _changes(view) for what in provider.may_change)


def moves(view: HostView) -> dict[str, tuple[str, ...]]:
    """Slot → what of its card's identity the plan's change providers declare that they move there."""
    return {slot: what for provider, own in _changes(view) for slot, what in provider.moves(own).items()}


def judge(view: HostView, report: FactsReport) -> Verdict:
    if report.state != "done":
        return by_state(report)
    before, now = snapshot.parse(sealed(view).get("facts") or {}), report.picture
    settling = _settling(sealed(view).get("facts") or {}, report, now)
    lost = card_settings.compare(before.cards, now.cards, but=moves(view))
    only_told = view.params.get("card_settings") == "report"
    wrong, told = ((), lost.problems) if only_told else (lost.problems, ())
    if (settling or wrong) and view.waited < view.params.get("settle", 60):
        return Verdict.again(LOOK_AGAIN_S, "; ".join([*settling, *wrong]))
    moved = [*_moved(view, before, now, report), *wrong]
    versions = wanted.compare(wanted_versions(view), before, now)
    failed = [f"{name} could not be looked at: {why}" for name, why in sorted(report.errors.items())]
    failed += containers.losses(sealed(view).get("facts") or {}, report.facts, now)
    failed += settling + fabric.troubles(report.facts, now) + _missing_cards(before, now)
    failed += [found.says for found in versions if not found.ok]
    good = [found.says for found in versions if found.ok]
    good += filter(None, [fabric.superfluous(report.facts, now)])
    for fine, line in (*_function(view, report, before, now), *_files(view, report)):
        (good if fine else failed).append(line)
    lines = (*moved, *failed, *card_settings.restored(report.restored), *told, *lost.notes, *good)
    if failed:
        return Verdict.reject("; ".join([*failed, *moved]), lines)
    return Verdict.hold("; ".join(moved), lines) if moved else Verdict.accept("verified", lines)


def _settling(before: Any, report: FactsReport, now: Snapshot) -> list[str]:
    """What may come by itself: units that are starting, cards that do not answer yet."""
    found = [] if now.smi.ok or not (now.pci or now.driver.userspace) else [now.smi.why]
    was, states = mapping(before.get("services")), mapping(report.facts.get("services"))
    for name, row in states.items():
        active = mapping(row).get("active")
        if mapping(was.get(name)).get("active") == "active" and active in ("inactive", "failed", "activating"):
            found.append(f"{name} should be active, is {active}")
    return found


def _moved(view: HostView, before: Snapshot, now: Snapshot, report: FactsReport) -> list[str]:
    """Identity that moved without leave: another machine, or another card in a slot. A human must look."""
    same_slot = [card for card in before.cards if card.bus_id in {other.bus_id for other in now.cards}]
    seen = [card for card in now.cards if card.bus_id in {other.bus_id for other in before.cards}]
    machine = identity.moved(sealed(view).get("facts") or {}, report.facts)
    free = moves(view)
    cards = [
        line
        for slot in dict.fromkeys(card.bus_id for card in same_slot)
        for line in identity.compare_cards(_in(slot, same_slot), _in(slot, seen), now.pci, free.get(slot, ()))
    ]
    return [*machine, *cards]


def _in(slot: str, cards: Sequence[Card]) -> list[Card]:
    return [card for card in cards if card.bus_id == slot]


def _missing_cards(before: Snapshot, now: Snapshot) -> list[str]:
    if not now.smi.ok:
        return []  # said already
    gone = [card for card in before.cards if card.bus_id not in {other.bus_id for other in now.cards}]
    lines = identity.compare_cards(before.cards, now.cards, now.pci, ("gpu_uuid", "serial", "gpu_name")) if gone else ()
    return list(lines)


def _function(view: HostView, report: FactsReport, before: Snapshot, now: Snapshot) -> list[tuple[bool, str]]:
    bare = any(card.mig_mode == "Enabled" and not card.mig for card in now.cards)
    if bare and not (report.function or {}).get("cards"):
        return [(True, "GPU function: not tested, CUDA shows no device of a card in MIG mode without MIG devices")]
    cards = [card.uuid for card in before.cards if card.uuid]
    swapped = "gpu_uuid" in may_change(view)
    verdict = gpu_function.judge_function(
        report.function or {},
        gpu_function.expected(now.cards, len(before.cards) if swapped or not cards else cards),
    )
    if verdict.outcome == "accept":
        return [(True, f"GPU function: {line}") for line in verdict.findings] or [
            (True, f"GPU function: {verdict.why}")
        ]
    return [(False, f"GPU function: {line}") for line in verdict.findings or (verdict.why,)]


def _files(view: HostView, report: FactsReport) -> list[tuple[bool, str]]:
    if not view.params.get("hashes", True) or not manifests.parse(sealed(view).get("manifest")):
        return []
    now = manifests.parse(report.manifest)
    if now is None:
        return [(False, "manifest: not made")]
    return [
        manifests.proof(now),
        *consistency.judge(consistency.parse(sealed(view).get("manifest")), consistency.parse(report.manifest)),
    ]


PROVIDER = Provider(
    phase="verify",
    name="host",
    does="Prove identity, versions, files and GPU function against the seal and the plan.",
    params=VerifyParams,
    report=FactsReport,
    root_for="to read every file below record.paths; the GPU tests",
    args=args,
    judge=judge,
    estimate_s=10.0,
)
