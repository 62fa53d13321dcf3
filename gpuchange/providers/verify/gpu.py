"""verify/gpu: the cards are as fast as before, or as the plan wants them, and stand a load of all of them at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from gpuchange.checks import benchmark, gpu_function, metrics, stress
from gpuchange.checks.benchmark import Finding
from gpuchange.checks.snapshot import mapping, parse
from gpuchange.providers.contract import HostView, Mode, Params, Provider
from gpuchange.providers.facts import sealed, section
from gpuchange.providers.measured import MeasureReport, benchmark_args, running, wanted_metrics
from gpuchange.providers.types import AbsPath, Count, Duration, Percent, Short
from gpuchange.reports import Verdict, by_state

BASELINE = "baseline/gpu"
PROGRAMS_OWN = (13, 31, 43, 45)
"""Xids that NVIDIA's table gives to programs: before the load they may stem from the jobs that drain ended."""


class StressParams(Params):
    """All cards are loaded at once while errors, heat and progress are watched."""

    for_: Duration = Field(60, alias="for", description="How long the cards are loaded.")
    hang: Duration = Field(30, ge=1, description="A card whose load makes no progress for so long hangs.")
    max_temperature: Count = Field(90, description="Highest temperature of a card in °C.")
    accept_xids: tuple[Count, ...] = Field(
        PROGRAMS_OWN, description="Xid numbers of before the load that do not count; under load each one does."
    )
    python: AbsPath | None = Field(
        None,
        description="Interpreter whose PyTorch carries the load; default: python3, if it has one that sees the cards.",
    )


class SpeedParams(Params):
    """Speed against the baseline, and stress."""

    tolerance: Percent = Field(5.0, description="How much slower than the baseline a card may be.")
    stress: Annotated[StressParams, Short("for")] | None = Field(
        None, description="Load all cards for so long before the host serves again; left out: no stress."
    )


def args(view: HostView, _mode: Mode) -> dict[str, Any]:
    asked: dict[str, Any] = {"generation": view.retries}
    if _compares(view):
        asked.update(benchmark_args(_wanted(view), view.retries))
    given = mapping(view.params.get("stress"))
    if given:
        asked["stress"] = {
            "seconds": given.get("for", 60),
            "hang_s": given.get("hang", 30),
            "since": mapping(sealed(view).get("facts")).get("at") or 0,
            "query": list(stress.QUERY),
            "python": given.get("python") or "",
        }
    return asked


def _wanted(view: HostView) -> dict[str, Any]:
    return section(view, "baseline")


def _before(view: HostView) -> Mapping[str, Any]:
    return view.last.get(BASELINE) or {}


def _compares(view: HostView) -> bool:
    """Whether there is anything that a benchmark could be held against."""
    wanted = _wanted(view)
    return bool(mapping(_before(view).get("bench")).get("ok") or wanted.get("command") or mapping(wanted.get("floors")))


def judge(view: HostView, report: MeasureReport) -> Verdict:
    waiting = running(view, report)
    if waiting:
        return waiting
    if report.state != "done":
        return by_state(report)
    found = [*_speed(view, report), *_stress(view, report)]
    failed = tuple(line for fine, line in found if not fine)
    lines = (*failed, *(line for fine, line in found if fine))
    return Verdict.reject("; ".join(failed), lines) if failed else Verdict.accept("", lines)


def _speed(view: HostView, report: MeasureReport) -> list[tuple[bool, str]]:
    if not _compares(view):
        return []
    before, now = mapping(_before(view).get("bench")), report.bench or {}
    if not now.get("ok"):
        return [(False, f"benchmark: {now.get('why') or 'not measured'}")]
    rows = [(row.ok, f"benchmark: {row.sentence}") for row in compared(view.plan, view.params, _before(view), report)]
    return rows + [(fine, f"benchmark: {line}") for fine, line in benchmark.links(before, now)]


def compared(
    plan: Mapping[str, Any], params: Mapping[str, Any], before: Mapping[str, Any], report: MeasureReport
) -> list[Finding]:
    """Every metric of cards and command, before against after; `before` is the baseline's report body, or {}."""
    wanted = mapping(plan.get("baseline"))
    floors = {name: float(value) for name, value in mapping(wanted.get("floors")).items() if value is not None}
    tolerance = float(params.get("tolerance", benchmark.DEFAULT_TOLERANCE))
    cards = benchmark.compare(mapping(before.get("bench")), report.bench or {}, tolerance, floors)
    own = metrics.compare(wanted_metrics(wanted), mapping(before.get("command")), report.command or {})
    return [*cards, *own]


def _stress(view: HostView, report: MeasureReport) -> list[tuple[bool, str]]:
    given = mapping(view.params.get("stress"))
    if not given:
        return []
    facts = mapping(mapping(view.last.get("verify/host")).get("facts"))
    seen = parse(facts).cards
    named = gpu_function.expected(seen, [card.uuid for card in seen if card.uuid])
    cards = () if isinstance(named, int) else tuple(named)
    accepted = frozenset(int(number) for number in given.get("accept_xids", PROGRAMS_OWN))
    judged = stress.judge(report.stress or {}, stress.Limits(int(given.get("max_temperature", 90)), accepted, cards))
    return [*((False, line) for line in judged.failures), *((True, line) for line in judged.notes)]


def preview(view: HostView, _report: MeasureReport) -> tuple[str, ...]:
    given = mapping(view.params.get("stress"))
    return (f"all cards loaded for {given.get('for', 60)} s",) if given else ()


PROVIDER = Provider(
    phase="verify",
    name="gpu",
    does="Measure the cards against the baseline; load them all for the time asked.",
    params=SpeedParams,
    report=MeasureReport,
    root_for="exclusive use of the GPUs, the kernel log",
    args=args,
    judge=judge,
    preview=preview,
    foresees=True,
    estimate_s=15.0,
)
