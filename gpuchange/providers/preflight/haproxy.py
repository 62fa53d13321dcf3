"""preflight/haproxy: every balancer can be asked, knows the server, and may be told to drain it. Changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuchange.checks.haproxy import before_drain, objections
from gpuchange.providers.contract import HostView, Mode, Params, Provider
from gpuchange.providers.drain.haproxy import HaproxyReport, arguments, preview
from gpuchange.reports import Verdict, by_state


class HaproxyPreflight(Params):
    """Brought along by `drain: [{provider: haproxy}]`."""


def args(view: HostView, _mode: Mode) -> dict[str, Any]:
    return arguments(view.host, _entry(view.plan))


def _entry(plan: Mapping[str, Any]) -> dict[str, Any]:
    """The plan's own parameters of drain/haproxy."""
    rows = (row for row in plan.get("drain") or () if row.get("provider") == "haproxy")
    return {key: value for key, value in next(rows, {}).items() if key != "provider"}


def judge(view: HostView, report: HaproxyReport) -> Verdict:
    if report.state not in ("done", "not_done"):  # whether it is drained is not the question here
        return by_state(report)
    least = int(_entry(view.plan).get("min_serving", 1))
    against = tuple(line for part in report.parts for line in objections(part, least))
    lines = tuple(line for part in report.parts for line in before_drain(part))
    return Verdict.reject("; ".join(against), (*against, *lines)) if against else Verdict.accept(findings=lines)


PROVIDER = Provider(
    phase="preflight",
    name="haproxy",
    does="Ask every balancer for the host's server, its sessions, and who else serves.",
    params=HaproxyPreflight,
    report=HaproxyReport,
    root_for="the balancer's admin socket and its owner marker",
    root_on="its balancers",
    args=args,
    judge=judge,
    preview=preview,
    estimate_s=3.0,
)
