"""preflight/apt: choose the complete package set and simulate its transaction on the host. Changes nothing."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gpuchange.checks.packages import Move, Transaction, component_lines, count_line
from gpuchange.providers.contract import HostView, Mode, Params, Provider
from gpuchange.providers.facts import section, wanted
from gpuchange.reports import Report, Verdict, by_state


class AptPreflight(Params):
    """Brought along by `stack: {provider: apt}`."""


class AptPreflightReport(Report):
    """`before`, `after`: {component: version}. `problems` stand in the way, `findings` are worth knowing."""

    as_wanted: bool = False
    before: dict[str, str] = Field(default_factory=dict)
    after: dict[str, str] = Field(default_factory=dict)
    moves: tuple[Move, ...] = ()
    transaction: Transaction = Transaction()
    reboot_needed: bool = False
    sizes: dict[str, int] = Field(default_factory=dict)
    not_obtainable: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()


def args(view: HostView, _mode: Mode) -> dict[str, Any]:
    return {"wanted": wanted(view), "cuda_select": bool(section(view, "stack").get("cuda_select"))}


def one_way(view: HostView, missing: tuple[str, ...]) -> str:
    """Why this host's change could not be rolled back, unless the operator has accepted that for this host."""
    if not missing or view.host in (view.plan.get("accept_irreversible") or ()):
        return ""
    return f"cannot guarantee rollback for {', '.join(missing)}: accept that with --accept-irreversible {view.host}"


def judge(view: HostView, report: AptPreflightReport) -> Verdict:
    if report.state not in ("done", "not_done"):
        return by_state(report)
    irreversible = one_way(view, report.not_obtainable)
    against = (*report.problems, *((irreversible,) if irreversible else ()))
    if against:
        return Verdict.reject("; ".join(against), report.findings)
    return Verdict.accept(findings=report.findings)


def preview(_view: HostView, report: AptPreflightReport) -> tuple[str, ...]:
    if report.as_wanted:
        return ("already as wanted",)
    lines = [*component_lines(report.before, report.after), count_line(report.moves)]
    lines += [*report.problems, *report.findings]
    if report.not_obtainable:
        lines.append(f"no way back for {', '.join(report.not_obtainable)}")
    return tuple(line for line in lines if line)


PROVIDER = Provider(
    phase="preflight",
    name="apt",
    does="Choose the packages and simulate the transaction; sources, space, holds, headers, way back.",
    params=AptPreflight,
    report=AptPreflightReport,
    root_for="apt's package lists and a trial of the transaction",
    args=args,
    judge=judge,
    preview=preview,
    binaries=("apt-get", "apt-cache", "apt-mark", "dpkg-query"),
    estimate_s=15.0,
)
