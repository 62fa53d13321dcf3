"""Numbers out of a benchmark command's output: by JSON pointer (RFC 6901) or by regular expression. Pure."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuchange.checks.benchmark import DEFAULT_TOLERANCE, Finding, Metric, judged


@dataclass(frozen=True)
class Wanted:
    """One metric of the plan: where it stands in the output, and how it is judged. One of `pointer` and `regex`."""

    name: str
    pointer: str | None = None
    regex: str | None = None
    higher_is_better: bool = True
    tolerance: float = DEFAULT_TOLERANCE
    floor: float | None = None


class NotFound(Exception):
    """The output does not hold the metric; the message says why."""


def wanted(rows: Sequence[Mapping[str, Any]]) -> tuple[Wanted, ...]:
    """The metrics of a plan's JSON data."""
    return tuple(
        Wanted(
            str(row["name"]),
            row.get("pointer"),
            row.get("regex"),
            row.get("better", "higher") == "higher",
            float(row.get("tolerance", DEFAULT_TOLERANCE)),
            row.get("floor"),
        )
        for row in rows
    )


def pointed(document: Any, pointer: str) -> Any:
    """What a JSON pointer names. Raises NotFound."""
    at = document
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(at, dict) and key in at:
            at = at[key]
        elif isinstance(at, list) and re.fullmatch(r"0|[1-9][0-9]{0,8}", key) and int(key) < len(at):
            at = at[int(key)]
        else:
            raise NotFound(f"{pointer} is not in its output")
    return at


def document(text: str) -> Any:
    """The output as JSON: all of it, or its last line that is an object or a list. Raises NotFound."""
    for candidate in (text, *reversed(text.splitlines()[-200:])):
        if candidate.lstrip()[:1] in ("{", "["):
            try:
                return json.loads(candidate)
            except (ValueError, RecursionError):
                continue
    raise NotFound("its output is not JSON")


def number(value: Any) -> float:
    """A finite number from a JSON number or a text. Raises NotFound."""
    try:
        found = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found):
        raise NotFound(f"{str(value)[:80]!r} is not a number")
    return found


def value(metric: Wanted, text: str) -> float:
    """The metric in the output of one run. Raises NotFound."""
    if metric.pointer is not None:
        return number(pointed(document(text), metric.pointer))
    found = re.search(metric.regex or "", text, re.M)
    if not found:
        raise NotFound("the regular expression matches nothing in its output")
    return number(found[1])


def read(metric: Wanted, result: Mapping[str, Any]) -> Metric:
    """Median and spread over the runs of a command (`gpuchange_gpu_work.command`). Raises NotFound."""
    found = result.get("runs")
    runs = [run for run in found if isinstance(run, Mapping)] if isinstance(found, list | tuple) else []
    if not runs:
        raise NotFound("the command was not run")
    values = [_of_run(metric, run) for run in runs]
    middle = statistics.median(values)
    spread = (
        (max(values) - min(values)) / abs(middle) if middle else 0.0
    )  # may be inf, which excuses no more than MOST_NOISE
    return Metric(median=middle, spread=spread, samples=len(values))


def _of_run(metric: Wanted, run: Mapping[str, Any]) -> float:
    if run.get("hung"):
        raise NotFound(f"the command did not end within {run.get('seconds')} s")
    if run.get("rc") != 0:
        last = (str(run.get("err") or run.get("out") or "").strip().splitlines() or ["no output"])[-1]
        raise NotFound(f"the command ended with {run.get('rc')}: {last[:200]}")
    return value(metric, str(run.get("out") or ""))


def missing(metrics: Sequence[Wanted], result: Mapping[str, Any]) -> tuple[str, ...]:
    """A sentence for each metric that the command did not give."""
    said = []
    for metric in metrics:
        try:
            read(metric, result)
        except NotFound as why:
            said.append(f"{metric.name} is missing: {why}")
    return tuple(said)


def compare(metrics: Sequence[Wanted], before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Finding]:
    """Every metric of the plan's command. One that is missing afterwards fails; one that was missing before is said."""
    return [_compared(metric, before, after) for metric in metrics]


def _compared(metric: Wanted, before: Mapping[str, Any], after: Mapping[str, Any]) -> Finding:
    try:
        now = read(metric, after)
    except NotFound as why:
        return Finding("command", metric.name, None, None, None, False, f"{metric.name} is missing: {why}")
    low = _floor(metric, now)
    try:
        was = read(metric, before)
    except NotFound as why:
        words = low or f"{metric.name} {now.median:.6g}, nothing to compare with: {why} before the change"
        return Finding("command", metric.name, None, now.median, None, not low, words)
    start = f"{metric.name} {was.median:.6g}"
    change, fine, words = judged(start, "", was, now, metric.higher_is_better, metric.tolerance)
    return Finding("command", metric.name, was.median, now.median, change, fine and not low, low or words)


def _floor(metric: Wanted, now: Metric) -> str:
    """Why the plan's floor does not hold; "" if it does."""
    if metric.floor is None:
        return ""
    holds = now.median >= metric.floor if metric.higher_is_better else now.median <= metric.floor
    word = "at least" if metric.higher_is_better else "at most"
    return "" if holds else f"{metric.name} {now.median:.6g}, the plan asks for {word} {metric.floor:g}"
