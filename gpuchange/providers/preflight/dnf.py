"""preflight/dnf: choose the packages and have dnf simulate the transaction on the host. Changes nothing."""

from __future__ import annotations

from typing import Any

from gpuchange.checks import compatibility
from gpuchange.checks.packages import Move, Transaction, component_lines, count_line
from gpuchange.providers.contract import HostView, Mode, Params, Provider
from gpuchange.providers.facts import asked
from gpuchange.providers.stacks import StackPreflightReport, judge_preflight, question
from gpuchange.reports import Verdict


class DnfPreflight(Params):
    """Brought along by `stack: {provider: dnf}`."""


class DnfPreflightReport(StackPreflightReport):
    """`moves` is all that dnf would do, `transaction` the same as exact versions."""

    moves: tuple[Move, ...] = ()
    transaction: Transaction = Transaction()


def args(view: HostView, _mode: Mode) -> dict[str, Any]:
    return {"wanted": asked(view)}


def judge(view: HostView, report: DnfPreflightReport) -> Verdict:
    chosen = compatibility.chosen_question(question(view), report.after, report.transaction.install)
    return judge_preflight(view, report, chosen)


def preview(_view: HostView, report: DnfPreflightReport) -> tuple[str, ...]:
    if report.as_wanted:
        return ("already as wanted",)
    lines = [*component_lines(report.before, report.after), count_line(report.moves)]
    lines += [*report.problems, *report.findings]
    if report.not_obtainable:
        lines.append(f"no way back for {', '.join(report.not_obtainable)}")
    return tuple(line for line in lines if line)


PROVIDER = Provider(
    phase="preflight",
    name="dnf",
    does="Choose the packages and have dnf simulate the transaction; repositories, space, locks, headers, way back.",
    params=DnfPreflight,
    report=DnfPreflightReport,
    root_for="dnf's metadata and a trial of the transaction",
    args=args,
    judge=judge,
    preview=preview,
    binaries=("dnf", "rpm"),
    estimate_s=20.0,
)
