"""preflight/apt: choose the complete package set and simulate its transaction on the host. Changes nothing."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gpuchange.checks import compatibility
from gpuchange.checks.packages import WORDS, Move, Transaction, component_lines, count_line
from gpuchange.checks.snapshot import mapping, parse
from gpuchange.compat.model import Question
from gpuchange.compat.resolver import Open, answer
from gpuchange.providers.contract import HostView, Mode, Params, Provider
from gpuchange.providers.facts import asked, evidence, section
from gpuchange.providers.types import OPEN
from gpuchange.reports import Report, Verdict, by_state


class AptPreflight(Params):
    """Brought along by `stack: {provider: apt}`."""


class AptPreflightReport(Report):
    """`before`, `after`: {component: version}. `problems` stand in the way, `findings` are worth knowing.

    `chosen`: {component: version} of what the plan leaves open; `offered`: how many versions were chosen from.
    """

    as_wanted: bool = False
    chosen: dict[str, str] = Field(default_factory=dict)
    offered: dict[str, int] = Field(default_factory=dict)
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
    select = bool(section(view, "stack").get("cuda_select"))
    left_open = open_parts(view)
    found = {"wanted": asked(view), "cuda_select": select}
    return {**found, "fits": compatibility.open_ranges(question(view), left_open)} if left_open else found


def open_parts(view: HostView) -> tuple[Open, ...]:
    """The components whose version the plan leaves to preflight."""
    versions = asked(view)
    parts: tuple[Open, ...] = ("driver", "cudnn")
    return tuple(part for part in parts if versions.get(part) == OPEN)


def question(view: HostView) -> Question:
    """What the resolver is asked about this host, as far as the plan names versions."""
    facts = mapping(evidence(view, "preflight/host").get("facts"))
    named = {part: version for part, version in asked(view).items() if version != OPEN}
    return compatibility.question(facts, parse(facts), named)


def one_way(view: HostView, missing: tuple[str, ...]) -> str:
    """Why this host's change could not be rolled back, unless the operator has accepted that for this host."""
    if not missing or view.host in (view.plan.get("accept_irreversible") or ()):
        return ""
    return f"cannot guarantee rollback for {', '.join(missing)}: accept that with --accept-irreversible {view.host}"


def judge(view: HostView, report: AptPreflightReport) -> Verdict:
    if report.state not in ("done", "not_done"):
        return by_state(report)
    irreversible = one_way(view, report.not_obtainable)
    against = (*report.problems, *((irreversible,) if irreversible else ()), *incompatible(view, report))
    lines = (*choices(report), *report.findings)
    return Verdict.reject("; ".join(against), lines) if against else Verdict.accept(findings=lines)


def incompatible(view: HostView, report: AptPreflightReport) -> tuple[str, ...]:
    """What the tables have against the chosen packages: now flavour, fabric manager and open versions are known."""
    if report.problems or "incompatible" in (section(view, "preflight").get("accept") or ()):
        return ()
    chosen = compatibility.chosen_question(question(view), report.after, report.transaction.install)
    return tuple(row.sentence() for row in compatibility.against(answer(chosen), tuple(report.after)))


def choices(report: AptPreflightReport) -> tuple[str, ...]:
    """`driver auto: 570.172.08, the newest of 4 offered that is known to fit`."""
    return tuple(
        f"{WORDS[part]} auto: {version}, the newest of {report.offered.get(part, 0)} offered that is known to fit"
        for part, version in report.chosen.items()
    )


def preview(_view: HostView, report: AptPreflightReport) -> tuple[str, ...]:
    if report.as_wanted:
        return (*choices(report), "already as wanted")
    lines = [*choices(report), *component_lines(report.before, report.after), count_line(report.moves)]
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
