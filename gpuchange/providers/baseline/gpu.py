"""baseline/gpu: measure every card of the idle host through the driver API, to compare with after the change."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from gpuchange.checks.snapshot import mapping
from gpuchange.providers.contract import HostView, Mode, Params, Provider
from gpuchange.reports import Report, Verdict, by_state


class BaselineParams(Params):
    """Benchmark of the idle host."""

    mode: Literal["required", "best_effort", "skip"] = Field(
        "best_effort",
        description="required: no change without it. best_effort: go on without it. skip: do not measure.",
    )


class BaselineReport(Report):
    """`result`: what the GPU benchmark measured, card by card."""

    test: str = "bench"
    result: dict[str, Any] = Field(default_factory=dict)


def args(_view: HostView, _mode: Mode) -> dict[str, Any]:
    return {"test": "bench"}


def judge(view: HostView, report: BaselineReport) -> Verdict:
    if report.state == "done":
        cards = [mapping(card) for card in report.result.get("cards", ())]
        return Verdict.accept(findings=tuple(_sentence(card) for card in cards))
    missed = report.state in ("not_done", "unknown") and not report.result.get("hung")
    if missed and view.params.get("mode") != "required":
        why = f"no baseline: {report.why}"
        return Verdict.accept(why, (why,))
    return by_state(report)


def _sentence(card: dict[str, Any]) -> str:
    metrics = {name: mapping(value).get("median") for name, value in mapping(card.get("metrics")).items()}
    return f"card {card.get('index')}: " + ", ".join(f"{name} {value:g}" for name, value in metrics.items() if value)


PROVIDER = Provider(
    phase="baseline",
    name="gpu",
    does="Measure copy bandwidth and launch time of every card.",
    params=BaselineParams,
    report=BaselineReport,
    root_for="exclusive use of the GPUs",
    args=args,
    judge=judge,
    estimate_s=10.0,
)
