"""baseline/gpu: measure every card of the idle host, and what the plan's own command says, before the change."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from gpuchange.checks import benchmark, metrics
from gpuchange.providers.contract import HostView, Mode, Provider
from gpuchange.providers.measured import BenchmarkParams, MeasureReport, benchmark_args, running, wanted_metrics
from gpuchange.reports import Verdict, by_state


class BaselineParams(BenchmarkParams):
    """Benchmark of the idle host, compared with after the change."""

    mode: Literal["required", "best_effort", "skip"] = Field(
        "best_effort",
        description="required: no change without it. best_effort: go on without it. skip: do not measure.",
    )


def args(view: HostView, _mode: Mode) -> dict[str, Any]:
    return benchmark_args(view.params, view.retries)


def judge(view: HostView, report: MeasureReport) -> Verdict:
    waiting = running(view, report)
    if waiting:
        return waiting
    bench, wanted = report.bench or {}, wanted_metrics(view.params)
    if bench.get("hung"):
        return Verdict.hold(str(bench.get("why") or "a driver call hangs and cannot be killed"))
    if report.state == "unknown":
        return by_state(report)
    lines = tuple(_sentence(card) for card in benchmark.cards(bench))
    missed = _missed(report, wanted)
    if missed and view.params.get("mode") == "required":
        return Verdict.reject("; ".join(missed), (*missed, *lines))
    notes = tuple(f"no baseline: {why}" for why in missed)
    return Verdict.accept("; ".join(notes), (*notes, *lines, *_command_lines(report, wanted)))


def _missed(report: MeasureReport, wanted: tuple[metrics.Wanted, ...]) -> list[str]:
    if report.state != "done":
        return [report.why]
    bench = report.bench or {}
    cards = [] if bench.get("ok") else [str(bench.get("why") or "the cards were not measured")]
    return [*cards, *metrics.missing(wanted, report.command or {})]


def _sentence(card: benchmark.MeasuredCard) -> str:
    told = [f"{name} {row.median:g} (noise {100 * row.spread:.2g}%)" for name, row in card.metrics.items()]
    return f"{card.label}: {', '.join(told) or card.why or 'not measured'}"


def _command_lines(report: MeasureReport, wanted: tuple[metrics.Wanted, ...]) -> list[str]:
    lines = []
    for metric in wanted:
        try:
            found = metrics.read(metric, report.command or {})
        except metrics.NotFound:
            continue
        lines.append(f"{metric.name} {found.median:.6g} (noise {100 * found.spread:.2g}%)")
    return lines


PROVIDER = Provider(
    phase="baseline",
    name="gpu",
    does="Measure every card, and run the plan's own benchmark command.",
    params=BaselineParams,
    report=MeasureReport,
    root_for="exclusive use of the GPUs",
    args=args,
    judge=judge,
    estimate_s=15.0,
)
