"""preflight/apt: choose the complete package set and simulate its transaction on the host. Changes nothing."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gpuchange.checks import compatibility
from gpuchange.checks.packages import WORDS, Move, Transaction, component_lines, count_line
from gpuchange.compat.resolver import Open
from gpuchange.providers.contract import HostView, Mode, Params, Provider
from gpuchange.providers.facts import asked, section
from gpuchange.providers.stacks import StackPreflightReport, judge_preflight, question
from gpuchange.providers.types import OPEN
from gpuchange.reports import Verdict


class AptPreflight(Params):
    """Brought along by `stack: {provider: apt}`."""


class AptPreflightReport(StackPreflightReport):
    """`chosen`: {component: version} of what the plan leaves open; `offered`: how many versions were chosen from."""

    chosen: dict[str, str] = Field(default_factory=dict)
    offered: dict[str, int] = Field(default_factory=dict)
    moves: tuple[Move, ...] = ()
    transaction: Transaction = Transaction()


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


def judge(view: HostView, report: AptPreflightReport) -> Verdict:
    """Now flavour, fabric manager and open versions are known, so the tables are asked about the packages."""
    chosen = compatibility.chosen_question(question(view), report.after, report.transaction.install)
    return judge_preflight(view, report, chosen, choices(report))


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
