"""Before and after on a real lab host: each card and the plan's own command, measured in a host unit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from measuring import CHANGE, Bench
from playing import Player

from gpuchange.checks.benchmark import METRICS
from gpuchange.lab import Lab

RATE = "/root/rate"
PLAN = {
    "baseline": {
        "mode": "required",
        "command": ["/bin/sh", "-c", f"echo '{{\"rate\": '$(cat {RATE})'}}'; echo 'step time: 12.5 ms'"],
        "metrics": [
            {"name": "rate", "pointer": "/rate", "better": "higher", "tolerance": 5.0},
            {"name": "step", "regex": "step time: ([0-9.]+) ms", "better": "lower", "tolerance": 5.0},
        ],
        "warm_up": 1,
        "repeats": 2,
    }
}


@pytest.fixture(scope="module")
def bench(lab: Lab) -> Iterator[Bench]:
    """An idle host that has been measured once."""
    lab.host("gpu1").restore("start")
    made = Bench(Player(lab, "gpu1", CHANGE), PLAN)
    made.player.sh(f"systemctl disable --now modelserver.service; echo 812 > {RATE}")
    verdict = made.baseline()
    assert verdict.outcome == "accept", verdict
    yield made


def test_the_baseline_has_every_metric_of_every_card_and_of_the_command(bench: Bench) -> None:
    body = bench.evidence["baseline/gpu"]
    assert [set(card["metrics"]) for card in body["bench"]["cards"]] == [set(METRICS)] * 2
    assert len(body["command"]["runs"]) == 2
    again = bench.speed()
    assert again.outcome == "accept", again
    assert sum("link Gen5 x16 under load" in line for line in again.findings) == 2
    assert "benchmark: rate 812 → 812 (+0.0%, allowed -5%, noise 0% and 0%)" in again.findings


def test_one_slow_card_and_a_slower_command_are_named_with_what_became_slower(bench: Bench) -> None:
    bench.player.sh(f"echo 700 > {RATE}")
    with bench.broken("slow-one-card"):
        verdict = bench.speed()
    bench.player.sh(f"echo 812 > {RATE}")
    assert verdict.outcome == "reject"
    for title in ("host to device", "within the device", "FP32 multiply-add", "kernel launch"):
        assert f"{bench.card(1)}: {title}" in verdict.why
    assert f"{bench.card(0)}: FP32" not in verdict.why
    assert "rate 812 → 700 (-13.8%, allowed -5%" in verdict.why


@pytest.mark.case("link-trained-low-silent-slowdown")
def test_half_a_link_is_seen_under_load_though_the_card_computes_as_fast(bench: Bench) -> None:
    with bench.broken("link-half-width"):
        verdict = bench.speed()
    assert verdict.outcome == "reject"
    assert f"{bench.card(1)}: link Gen5 x8 under load, was Gen5 x16" in verdict.why
    assert f"{bench.card(1)}: host to device" in verdict.why and "FP32" not in verdict.why
