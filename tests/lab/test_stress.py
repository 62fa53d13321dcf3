"""All cards of a real lab host under load: what each fault is called, and that no hang holds up the verdict."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from measuring import CHANGE, HANG_S, Bench
from playing import Player

from gpuchange.lab import Lab

FAULTS = (
    ("ecc-errors", (0, 1), "uncorrectable memory errors"),
    ("overheat", (0, 1), "96 °C, at most 90 °C are allowed"),
    ("throttle-under-load", (0, 1), "clocks slowed down by heat (hardware limit)"),
    ("xid-in-log", (1,), "Xid 62 (internal micro-controller halt)"),
)
"""(fault, the cards that it hits, what is said of them)."""


@pytest.fixture(scope="module")
def bench(lab: Lab) -> Iterator[Bench]:
    lab.host("gpu2").restore("start")
    made = Bench(Player(lab, "gpu2", CHANGE))
    made.player.sh("systemctl disable --now modelserver.service")
    yield made


def test_good_cards_stand_the_load(bench: Bench) -> None:
    body, verdict = bench.stress()
    assert verdict.outcome == "accept", verdict
    assert all(card["rounds"] > 0 for card in body["stress"]["cards"])
    assert any(f"{bench.card(0)}: " in line and "rounds right" in line for line in verdict.findings)
    assert body["stress"]["log"]["source"], "the kernel log was not read"


def test_wrong_results_under_load_name_their_cards(bench: Bench) -> None:
    with bench.broken("wrong-values"):
        _, verdict = bench.stress(3)
    assert verdict.outcome == "reject"
    assert all(f"{bench.card(index)}: fma: " in verdict.why for index in (0, 1)), verdict


def test_each_of_several_faults_names_its_cards(bench: Bench) -> None:
    with ExitStack() as staged:
        for fault, _, _ in FAULTS:
            staged.enter_context(bench.broken(fault, reload=fault == "xid-in-log"))
        _, verdict = bench.stress(3)
    assert verdict.outcome == "reject", verdict
    for fault, cards, says in FAULTS:
        hit = [index for index in (0, 1) if any(bench.card(index) in f and says in f for f in verdict.findings)]
        assert hit == list(cards), (fault, verdict)


def test_a_kernel_that_never_ends_is_a_hang_of_that_card_and_ends_in_time(bench: Bench) -> None:
    began = time.monotonic()
    with bench.broken("kernel-hangs"):
        _, verdict = bench.stress(10)
    assert verdict.outcome == "reject" and f"{bench.card(1)}: no progress for {HANG_S} s at round" in verdict.why
    assert bench.card(0) not in verdict.why
    assert time.monotonic() - began < 90


@pytest.mark.case("fell-off-bus-without-xid-number")
def test_a_card_that_falls_off_the_bus_under_load_is_named_without_an_xid(bench: Bench) -> None:
    slot = bench.card(1).rpartition(" at ")[2].rstrip(")")
    lines = (
        f"NVRM: The NVIDIA GPU {slot}",
        "               NVRM: (PCI ID: 10de:2330) installed in this system has",
        "               NVRM: fallen off the bus and is not responding to commands.",
    )
    printed = "; ".join(f"echo \"[$(cut -d' ' -f1 /proc/uptime)] {line}\"" for line in lines)
    later = threading.Timer(6, bench.player.sh, [f"{{ {printed}; }} >> /run/gpuchange-lab/kernel.log"])
    later.start()
    _, verdict = bench.stress(12)
    later.join()
    assert verdict.outcome == "reject"
    assert f"kernel log: {bench.card(1)} fell off the bus (no Xid line)" in verdict.why
