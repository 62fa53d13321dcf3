"""preflight/runfile: is this the installer that the plan means, would it run on the host, is there a way back?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic import Field

from gpuchange.checks.packages import component_lines
from gpuchange.providers.contract import HostView, Mode, Params, Provider
from gpuchange.providers.facts import section
from gpuchange.providers.stacks import StackPreflightReport, judge_preflight, question
from gpuchange.reports import Verdict

KEYS = ("driver", "file", "sha256", "previous", "module", "dkms", "options")


class RunfilePreflight(Params):
    """Brought along by `stack: {provider: runfile}`."""


class RunfilePreflightReport(StackPreflightReport):
    """`transaction`: {driver, installer, previous: {file, sha256, version}, module, dkms, options}."""

    transaction: dict[str, Any] = Field(default_factory=dict)


def args(view: HostView, _mode: Mode) -> dict[str, Any]:
    stack = section(view, "stack")
    return {"wanted": {key: stack.get(key) for key in KEYS}}


def judge(view: HostView, report: RunfilePreflightReport) -> Verdict:
    """A .run file brings the driver alone: what else is there, a fabric manager for one, must fit it as it is."""
    asked = question(view)
    driver, module = report.after.get("driver"), str(report.transaction.get("module") or "")
    return judge_preflight(view, report, replace(asked, driver=driver or asked.driver, module=module or asked.module))


def preview(_view: HostView, report: RunfilePreflightReport) -> tuple[str, ...]:
    if report.as_wanted:
        return ("already as wanted",)
    lines = [*component_lines(report.before, report.after), *report.problems, *report.findings]
    if report.not_obtainable:
        lines.append(f"no way back for {', '.join(report.not_obtainable)}")
    return tuple(lines)


PROVIDER = Provider(
    phase="preflight",
    name="runfile",
    does="Examine NVIDIA's .run installer and the host: sha256, its own check, version, what is in its way, way back.",
    params=RunfilePreflight,
    report=RunfilePreflightReport,
    root_for="to read the installer, and what an earlier one has installed",
    args=args,
    judge=judge,
    preview=preview,
    estimate_s=10.0,
)
