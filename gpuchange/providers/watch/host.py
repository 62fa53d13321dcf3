"""watch/host: the host serves again; errors, heat, lost cards and failing services roll it back."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gpuchange.checks.snapshot import mapping, parse
from gpuchange.checks.soak import QUERY, Limits, faults, notes
from gpuchange.providers.contract import HostView, Mode, Params, Provider
from gpuchange.providers.types import Count, Duration, UnitName
from gpuchange.reports import Report, Verdict, by_state

INTERVAL_S = 15.0
PROGRAMS_OWN = (13, 31, 43, 45)
"""Xids that NVIDIA's table gives to programs rather than to card or driver."""


class WatchParams(Params):
    """How long a host is watched in service, and what ends its change."""

    for_: Duration = Field(30, alias="for", description="How long the host is watched.")
    services: tuple[UnitName, ...] = Field(
        (), description="Services that must stay active, beside those that the plan names elsewhere."
    )
    max_temperature: Count = Field(90, description="Highest temperature of a card in °C.")
    accept_xids: tuple[Count, ...] = Field(PROGRAMS_OWN, description="Xid numbers that do not count as a failure.")


class WatchReport(Report):
    """`now` and `first` are raw looks: {boot_id, smi, log, services}; times in seconds."""

    elapsed_s: float = 0.0
    left_s: float = 0.0
    now: dict[str, Any] = Field(default_factory=dict)
    first: dict[str, Any] = Field(default_factory=dict)


def args(view: HostView, _mode: Mode) -> dict[str, Any]:
    return {
        "for_s": view.params.get("for", 30),
        "query": list(QUERY),
        "services": _services(view),
        "since": mapping(mapping(view.last.get("seal/host")).get("facts")).get("at") or 0,
        "fresh": view.waited == 0,  # the first look, also after an operator's retry
    }


def _services(view: HostView) -> list[str]:
    named = [mapping(view.plan.get(key)).get("services") or () for key in ("gpu_users", "record")]
    return list(dict.fromkeys([*view.params.get("services", ()), *(unit for units in named for unit in units)]))


def limits(view: HostView) -> Limits:
    """The plan's limits, and the cards that the last proof of this host saw."""
    facts = mapping(mapping(view.last.get("verify/host")).get("facts"))
    cards = tuple(card.uuid for card in parse(facts).cards if card.uuid) if facts else ()
    accepted = frozenset(int(number) for number in view.params.get("accept_xids", PROGRAMS_OWN))
    return Limits(int(view.params.get("max_temperature", 90)), accepted, cards)


def judge(view: HostView, report: WatchReport) -> Verdict:
    allowed = limits(view)
    found = faults(report.now, report.first, allowed) if report.now else ()
    if found:
        return Verdict.reject("; ".join(found), found)
    if report.state == "running":
        return Verdict.again(max(1.0, min(INTERVAL_S, report.left_s)), report.why)
    if report.state != "done":
        return by_state(report)
    said = (f"watched for {report.elapsed_s:.0f} s: no error, no card lost, services up", *notes(report.now, allowed))
    return Verdict.accept(findings=said)


def preview(view: HostView, _report: WatchReport) -> tuple[str, ...]:
    return (f"watched for {view.params.get('for', 30)} s in service",)


PROVIDER = Provider(
    phase="watch",
    name="host",
    does="Watch the host in service: GPU errors, heat, lost cards, kernel log, services.",
    params=WatchParams,
    report=WatchReport,
    root_for="the kernel log",
    args=args,
    judge=judge,
    preview=preview,
    foresees=True,
    estimate_s=35.0,
)
