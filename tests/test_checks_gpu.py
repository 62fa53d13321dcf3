"""The pure judges of GPU function and speed, over cases in tests/cases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuchange.checks.benchmark import METRICS, compare, failed
from gpuchange.checks.gpu_function import judge_function

CASES = Path(__file__).parent / "cases"


def cases(folder: str) -> list[Any]:
    return [pytest.param(json.loads(p.read_text()), id=p.stem) for p in sorted((CASES / folder).glob("*.json"))]


@pytest.mark.parametrize("case", cases("gpu_function"))
def test_function(case: dict[str, Any]) -> None:
    verdict = judge_function(case["report"], case["expected"])
    assert verdict.outcome == case["outcome"]
    assert case["says"] in " ".join((verdict.why, *verdict.findings))


@pytest.mark.parametrize("case", cases("benchmark"))
def test_benchmark(case: dict[str, Any]) -> None:
    findings = compare(case["before"], case["after"], case["tolerance_percent"])
    worse = failed(findings)
    assert len(worse) == len(case["failed"]), worse
    assert all(any(said in sentence for sentence in worse) for said in case["failed"]), worse
    measured = sum(len(card["metrics"]) for card in case["before"]["cards"])
    assert len(findings) == measured  # nothing measured before goes uncompared


rate = st.floats(0.1, 5000, allow_nan=False)


@given(before=rate, after=rate, metric=st.sampled_from(sorted(METRICS)))
def test_worse_means_the_same_for_rates_and_times(before: float, after: float, metric: str) -> None:
    def result(value: float) -> dict[str, Any]:
        return {"cards": [{"index": 0, "uuid": "GPU-a", "metrics": {metric: {"median": value}}}]}

    [finding] = compare(result(before), result(after), 10.0)
    speed = after / before if METRICS[metric].higher_is_better else before / after
    assert finding.ok == (100 * (speed - 1) >= -10.0)
