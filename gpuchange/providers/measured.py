"""What baseline/gpu and verify/gpu share: the report of gpuchange_measure, and what the plan wants measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from gpuchange.checks import metrics
from gpuchange.checks.snapshot import mapping
from gpuchange.providers.contract import HostView, Params
from gpuchange.providers.types import Argv, Count, Duration, Name, Number, Percent, Pointer, Regex
from gpuchange.reports import Report, Verdict

BENCH_DEADLINE_S = 120.0
LOOK_AGAIN_S = 3.0


class MetricParams(Params):
    """One number of the command's output."""

    name: Name = Field(description="What it is called in what is said about it.")
    pointer: Pointer | None = Field(None, description="Where it stands in the output, if that is JSON (RFC 6901).")
    regex: Regex | None = Field(
        None, description="What finds it in the output, if that is text; its one group is the number."
    )
    better: Literal["higher", "lower"] = Field("higher", description="Which way is better.")
    tolerance: Percent = Field(5.0, description="How much worse than before it may be.")
    floor: Number | None = Field(None, description="The worst that is accepted, whatever it was before.")


class Floors(Params):
    """The worst that is accepted of any card, whatever was measured before; a new card has only this."""

    h2d: Number | None = Field(None, description="Host to device, GB/s.")
    d2h: Number | None = Field(None, description="Device to host, GB/s.")
    d2d: Number | None = Field(None, description="Within the device, GB/s copied.")
    peer: Number | None = Field(None, description="To the next card, GB/s.")
    fp32: Number | None = Field(None, description="FP32 multiply-add, GFLOP/s.")
    launch: Number | None = Field(None, description="Kernel launch, µs at most.")


class BenchmarkParams(Params):
    """The plan's own benchmark beside the built-in one."""

    command: Argv | None = Field(None, description="Your own benchmark on the host: program and arguments, no shell.")
    metrics: tuple[MetricParams, ...] = Field((), description="The numbers of its output that are compared.")
    timeout: Duration = Field(600, description="How long one run of the command may take.")
    warm_up: Count = Field(1, description="Runs of the command that do not count.")
    repeats: Count = Field(3, ge=1, le=20, description="Runs of the command that count; their median is compared.")
    floors: Floors | None = Field(None, description="What any card must reach.")


class MeasureReport(Report):
    """`bench`: the cards; `command`: {runs}; `stress`. None: not asked for."""

    bench: dict[str, Any] | None = None
    command: dict[str, Any] | None = None
    stress: dict[str, Any] | None = None


def benchmark_args(baseline: Mapping[str, Any], generation: int) -> dict[str, Any]:
    """Arguments of gpuchange_measure for the cards and the command of the plan's `baseline`."""
    asked: dict[str, Any] = {"bench": {"deadline_s": BENCH_DEADLINE_S}, "generation": generation}
    if baseline.get("command"):
        asked["command"] = {
            "argv": list(baseline["command"]),
            "warm_ups": baseline.get("warm_up", 1),
            "repeats": baseline.get("repeats", 3),
            "timeout_s": baseline.get("timeout", 600),
        }
    return asked


def wanted_metrics(baseline: Mapping[str, Any]) -> tuple[metrics.Wanted, ...]:
    return metrics.wanted([mapping(row) for row in baseline.get("metrics") or ()])


def running(_view: HostView, report: Report) -> Verdict | None:
    return Verdict.again(LOOK_AGAIN_S, report.why) if report.state == "running" else None
