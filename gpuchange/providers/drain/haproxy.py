"""drain/haproxy: out of one or several HAProxy balancers, sessions awaited; back in as found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from gpuchange.checks.haproxy import Part, before_drain, drained, released, unfinished
from gpuchange.providers.contract import HostView, Mode, Params, Provider
from gpuchange.providers.types import AbsPath, Count, Duration, HostPattern, Name, OneOrMany
from gpuchange.reports import Report, Verdict, by_state

LOOK_AGAIN_S = 1.0
"""A call waits up to 40 s on the balancer itself, so the next may follow at once."""


class HaproxyParams(Params):
    """How a host leaves HAProxy."""

    balancers: Annotated[tuple[HostPattern, ...], Field(min_length=1), OneOrMany()] = Field(
        description="Hosts or groups of the inventory that run HAProxy; the server is drained on each of them."
    )
    backend: Annotated[tuple[Name, ...], OneOrMany()] = Field(
        (), description="Backend or list of backends; none: every backend that has the server."
    )
    socket: AbsPath = Field("/run/haproxy/admin.sock", description="Runtime API of HAProxy, with level admin.")
    servers: dict[Name, Name] = Field(
        default_factory=dict,
        description="HAProxy's server name for a host, where it is not the inventory's: host: server.",
    )
    timeout: Duration = Field(300, description="How long to wait for open sessions.")
    on_timeout: Literal["fail", "cut"] = Field(
        "fail", description="fail: the host goes back into service unchanged. cut: sessions are shut down."
    )
    min_serving: Count = Field(1, description="Other servers of each backend that must serve before a host leaves.")
    ready_within: Duration = Field(300, description="How long health checks may take to pass on release.")


class HaproxyReport(Report):
    """One part for each balancer."""

    parts: tuple[Part, ...] = ()


def args(view: HostView, _mode: Mode) -> dict[str, Any]:
    return arguments(view.host, view.params)


def arguments(host: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """What the module is given: the plan's parameters, with this host's server by name."""
    given = {key: value for key, value in params.items() if key not in ("servers", "backend")}
    names = params.get("servers") or {}
    return {**given, "backends": list(params.get("backend") or ()), "server": names.get(host, host)}


def judge(_view: HostView, report: HaproxyReport) -> Verdict:
    if report.state == "running":
        return Verdict.again(LOOK_AGAIN_S, unfinished(report.parts) or report.why)
    if report.state != "done":
        return by_state(report)
    return Verdict.accept(findings=tuple(line for part in report.parts for line in drained(part)))


def judge_undo(_view: HostView, report: HaproxyReport) -> Verdict:
    if report.state == "running":
        return Verdict.again(LOOK_AGAIN_S, unfinished(report.parts) or report.why)
    if report.state != "done":
        return by_state(report)
    return Verdict.accept(findings=tuple(line for part in report.parts for line in released(part)))


def preview(_view: HostView, report: HaproxyReport) -> tuple[str, ...]:
    """Per balancer: state found, sessions now, how many others serve."""
    return tuple(line for part in report.parts for line in before_drain(part))


PROVIDER = Provider(
    phase="drain",
    name="haproxy",
    does="Take the host out of HAProxy, wait for its open sessions; put it back as found once health checks pass.",
    params=HaproxyParams,
    report=HaproxyReport,
    root_for="the balancer's admin socket and its owner marker",
    root_on="its balancers",
    args=args,
    judge=judge,
    judge_undo=judge_undo,
    preview=preview,
    delegates=lambda params: tuple(params["balancers"]),
    estimate_s=8.0,
)
