"""What all load balancers have in common as providers: how a host leaves them, the report, and what is judged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from gpuchange.checks.balancer import Part, before_drain, drained, objections, released, unfinished
from gpuchange.providers.contract import HostView, Mode, Params, Provider
from gpuchange.providers.types import Count, Duration, HostPattern, Name, OneOrMany
from gpuchange.reports import Report, Verdict, by_state

LOOK_AGAIN_S = 1.0
"""A call waits up to 40 s on the balancer itself, so the next may follow at once."""
OWN_KEYS = ("servers", "backend", "upstream")


class BalancerParams(Params):
    """How a host leaves a balancer."""

    balancers: Annotated[tuple[HostPattern, ...], Field(min_length=1), OneOrMany()] = Field(
        description="Hosts or groups of the inventory that run the balancer; the server is drained on each of them."
    )
    servers: dict[Name, Name] = Field(
        default_factory=dict,
        description="The balancer's name of a host's server, where it is not the inventory's: host: server.",
    )
    timeout: Duration = Field(300, description="How long to wait for open sessions.")
    on_timeout: Literal["fail", "cut"] = Field(
        "fail", description="fail: the host goes back into service unchanged. cut: sessions are shut down."
    )
    min_serving: Count = Field(1, description="Other servers of each backend that must serve before a host leaves.")
    ready_within: Duration = Field(300, description="How long it may take on release until the server can serve.")


class BalancerReport(Report):
    """One part for each balancer."""

    parts: tuple[Part, ...] = ()


class BalancerPreflight(Params):
    """Brought along by the drain provider of the same name."""


def args(view: HostView, _mode: Mode) -> dict[str, Any]:
    return arguments(view.host, view.params)


def arguments(host: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """What the module is given: the plan's parameters, with this host's server by name."""
    given = {key: value for key, value in params.items() if key not in OWN_KEYS}
    names = params.get("servers") or {}
    backends = list(params.get("backend") or params.get("upstream") or ())
    return {**given, "backends": backends, "server": names.get(host, host)}


def judge(_view: HostView, report: BalancerReport) -> Verdict:
    if report.state == "running":
        return Verdict.again(LOOK_AGAIN_S, unfinished(report.parts) or report.why)
    if report.state != "done":
        return by_state(report)
    return Verdict.accept(findings=tuple(line for part in report.parts for line in drained(part)))


def judge_undo(_view: HostView, report: BalancerReport) -> Verdict:
    if report.state == "running":
        return Verdict.again(LOOK_AGAIN_S, unfinished(report.parts) or report.why)
    if report.state != "done":
        return by_state(report)
    return Verdict.accept(findings=tuple(line for part in report.parts for line in released(part)))


def preview(_view: HostView, report: BalancerReport) -> tuple[str, ...]:
    """Per balancer: state found, sessions now, how many others serve."""
    return tuple(line for part in report.parts for line in before_drain(part))


def drain(name: str, params: type[BalancerParams], *, does: str, root_for: str) -> Provider:
    """drain/<name>: out of every balancer, open sessions awaited; back in as found."""
    return Provider(
        phase="drain",
        name=name,
        does=does,
        params=params,
        report=BalancerReport,
        root_for=root_for,
        root_on="its balancers",
        args=args,
        judge=judge,
        judge_undo=judge_undo,
        preview=preview,
        delegates=lambda given: tuple(given["balancers"]),
        estimate_s=8.0,
    )


def preflight(name: str, *, root_for: str) -> Provider:
    """preflight/<name>: every balancer can be asked, knows the server, and may be told to drain it. Changes nothing."""

    def entry(plan: Mapping[str, Any]) -> dict[str, Any]:
        rows = (row for row in plan.get("drain") or () if row.get("provider") == name)
        return {key: value for key, value in next(rows, {}).items() if key != "provider"}

    def plan_args(view: HostView, _mode: Mode) -> dict[str, Any]:
        return arguments(view.host, entry(view.plan))

    def judge_probe(view: HostView, report: BalancerReport) -> Verdict:
        if report.state not in ("done", "not_done"):  # whether it is drained is not the question here
            return by_state(report)
        least = int(entry(view.plan).get("min_serving", 1))
        against = tuple(line for part in report.parts for line in objections(part, least))
        lines = tuple(line for part in report.parts for line in before_drain(part))
        return Verdict.reject("; ".join(against), (*against, *lines)) if against else Verdict.accept(findings=lines)

    return Provider(
        phase="preflight",
        name=name,
        does="Ask every balancer for the host's server, its sessions, and who else serves.",
        params=BalancerPreflight,
        report=BalancerReport,
        root_for=root_for,
        root_on="its balancers",
        args=plan_args,
        judge=judge_probe,
        preview=preview,
        estimate_s=3.0,
    )
