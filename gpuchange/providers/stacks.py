"""What the stack providers share: parts of their parameters, their reports, and how those are judged."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from gpuchange.checks import compatibility
from gpuchange.checks.packages import component_lines
from gpuchange.checks.snapshot import mapping, parse
from gpuchange.compat.model import Question
from gpuchange.compat.resolver import answer
from gpuchange.providers.contract import HostView
from gpuchange.providers.facts import asked, evidence, section
from gpuchange.providers.types import OPEN, Duration
from gpuchange.reports import Report, Verdict, by_state

LONGEST_REBOOT_S = 1800.0
LONGEST_BLOCK_S = 900.0
"""How long somebody else's package operation is waited for before a human has to look."""

Deadline = Annotated[Duration, Field(description="How long one package transaction, or one installer, may take.")]
DkmsLeftovers = Annotated[
    Literal["refuse", "set_aside"],
    Field(description="set_aside: move trees that removed modules left in DKMS out of its way; undone on rollback."),
]

# ------------------------------------------------------------------------------------------------ preflight


class StackPreflightReport(Report):
    """`before`, `after`: {component: version}. `problems` stand in the way, `findings` are worth knowing."""

    as_wanted: bool = False
    before: dict[str, str] = Field(default_factory=dict)
    after: dict[str, str] = Field(default_factory=dict)
    reboot_needed: bool = False
    sizes: dict[str, int] = Field(default_factory=dict)
    not_obtainable: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()


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


def incompatible(view: HostView, report: StackPreflightReport, chosen: Question) -> tuple[str, ...]:
    """What the tables have against what was chosen, unless something else is in the way already."""
    if report.problems or "incompatible" in (section(view, "preflight").get("accept") or ()):
        return ()
    return tuple(row.sentence() for row in compatibility.against(answer(chosen), tuple(report.after)))


def judge_preflight(
    view: HostView, report: StackPreflightReport, chosen: Question, said: tuple[str, ...] = ()
) -> Verdict:
    if report.state not in ("done", "not_done"):
        return by_state(report)
    irreversible = one_way(view, report.not_obtainable)
    against = (*report.problems, *((irreversible,) if irreversible else ()), *incompatible(view, report, chosen))
    lines = (*said, *report.findings)
    return Verdict.reject("; ".join(against), lines) if against else Verdict.accept(findings=lines)


# ---------------------------------------------------------------------------------------------------- stack


class StackReport(Report):
    """`left`: how much is not as wanted; `repaired`: what an interrupted try had left, and was put right."""

    driver: dict[str, Any] = Field(default_factory=dict)
    boot_id: str = ""
    rebooted: bool = False
    rebooting: bool = False
    blocked: bool = False
    left: int = 0
    repaired: tuple[str, ...] = ()


def overdue(view: HostView, report: StackReport) -> bool:
    """Whether a reboot, or somebody else's package operation, takes longer than any should."""
    longest = LONGEST_REBOOT_S if report.rebooting else LONGEST_BLOCK_S if report.blocked else float("inf")
    return report.state == "running" and view.waited > longest


def judge_stack(view: HostView, report: StackReport, wrong: tuple[str, ...], driver: str) -> Verdict:
    """`wrong`: what else is not as wanted; `driver`: the version that must be loaded, "" if any may be."""
    if overdue(view, report):
        return Verdict.hold(f"{report.why} for {view.waited:.0f} s")
    if report.state != "done":
        return by_state(report)
    loaded = report.driver.get("loaded")
    if driver and loaded != driver:
        wrong = (*wrong, f"the loaded driver is {loaded or 'none'}, not {driver}")
    return Verdict.reject("; ".join(wrong)) if wrong else Verdict.accept(findings=report.repaired)


def judge_stack_undo(view: HostView, report: StackReport, installed: object) -> Verdict:
    """Going back is judged as installed: whether the old driver works again is for prove to say."""
    if report.state == "not_done" and (installed or report.driver) and not report.left:
        return Verdict.accept(findings=(report.why,))
    if overdue(view, report):
        return Verdict.hold(f"{report.why} for {view.waited:.0f} s")
    return by_state(report)


def reboot_line(report: StackPreflightReport) -> str:
    return "one reboot: the driver changes" if report.reboot_needed else "no reboot"


def stack_preview(chosen: StackPreflightReport, *more: str) -> tuple[str, ...]:
    """What a preview says of a stack: each component there and back, `more` of the provider's own, the reboot."""
    if chosen.as_wanted:
        return ("nothing to install",)
    lines = (*component_lines(chosen.before, chosen.after), *more, reboot_line(chosen))
    return tuple(line for line in lines if line)
