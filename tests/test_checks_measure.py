"""Numbers out of commands, links, floors and what a stress run says: all pure."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpuchange.checks import benchmark, metrics, stress
from gpuchange.checks.metrics import NotFound, Wanted
from gpuchange.providers.baseline.gpu import PROVIDER as BASELINE
from gpuchange.providers.contract import HostView
from gpuchange.providers.measured import MeasureReport
from gpuchange.providers.verify.gpu import PROVIDER as SPEED

A, B = "GPU-857e9af9-ea7a-481c-ad34-dc36cc629378", "GPU-70ec2991-a3b7-446a-a34a-86ab64880e78"
SLOTS = {A: "0000:1b:00.0", B: "0000:43:00.0"}


def runs(*outputs: str, rc: int = 0) -> dict[str, Any]:
    return {"runs": [{"rc": rc, "out": out, "err": "", "seconds": 1.0} for out in outputs]}


# --- metrics of a command ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pointer", "found"),
    [("/rate", 12.5), ("/list/1/x", 7), ("/a~1b", 1), ("/m~0n", 2), ("/text", 3.5), ("/nested/deep/0", 4)],
)
def test_a_pointer_finds_its_number(pointer: str, found: float) -> None:
    document = {"rate": 12.5, "list": [0, {"x": 7}], "a/b": 1, "m~n": 2, "text": "3.5", "nested": {"deep": [4]}}
    assert metrics.value(Wanted("m", pointer), json.dumps(document)) == found


@pytest.mark.parametrize(
    ("pointer", "out", "why"),
    [
        ("/no", '{"rate": 1}', "is not in its output"),
        ("/list/2", '{"list": [1, 2]}', "is not in its output"),
        ("/list/-", '{"list": [1, 2]}', "is not in its output"),
        ("/rate", '{"rate": null}', "is not a number"),
        ("/rate", '{"rate": true}', "is not a number"),
        ("/rate", '{"rate": NaN}', "is not a number"),
        ("/rate", '{"rate": 1e999}', "is not a number"),
        ("/rate", "no json at all", "is not JSON"),
        ("/rate", "", "is not JSON"),
        ("/rate", "[" * 100_000, "is not JSON"),
    ],
)
def test_what_a_pointer_does_not_find_is_said(pointer: str, out: str, why: str) -> None:
    with pytest.raises(NotFound, match=why):
        metrics.value(Wanted("m", pointer), out)


def test_json_after_a_tools_chatter_is_found_and_the_last_one_counts() -> None:
    out = 'warming up [1/3]\n{"rate": 1}\nsome words\n{"rate": 2}\ndone\n'
    assert metrics.value(Wanted("m", "/rate"), out) == 2


def test_a_regex_finds_its_number_or_says_that_it_does_not() -> None:
    wanted = Wanted("m", regex=r"^throughput:\s+([0-9.]+) tok/s$")
    assert metrics.value(wanted, "x\nthroughput:  812.5 tok/s\n") == 812.5
    with pytest.raises(NotFound, match="matches nothing"):
        metrics.value(wanted, "throughput: fast\n")


@given(st.text(), st.text(alphabet="/~01ab", max_size=12))
def test_any_output_gives_a_number_or_not_found(out: str, pointer: str) -> None:
    with suppress(NotFound):
        metrics.value(Wanted("m", "/" + pointer), out)


def test_the_median_counts_and_the_spread_is_told() -> None:
    found = metrics.read(Wanted("m", "/r"), runs('{"r": 10}', '{"r": 30}', '{"r": 11}'))
    assert found.median == 11 and found.spread == pytest.approx(20 / 11) and found.samples == 3


@pytest.mark.parametrize(
    ("result", "why"),
    [
        ({}, "was not run"),
        (runs("out of memory\nKilled", rc=137), "ended with 137: Killed"),
        ({"runs": [{"rc": None, "hung": True, "seconds": 600.2}]}, "did not end within 600.2 s"),
        ({"runs": [{"rc": None, "out": "", "err": "bench: not installed"}]}, "bench: not installed"),
    ],
)
def test_a_command_that_failed_has_no_metric(result: dict[str, Any], why: str) -> None:
    (line,) = metrics.missing([Wanted("rate", "/r")], result)
    assert line.startswith("rate is missing: ") and why in line


@pytest.mark.parametrize(
    ("wanted", "before", "after", "ok", "says"),
    [
        (Wanted("rate", "/r"), 100, 96, True, "rate 100 → 96"),
        (Wanted("rate", "/r"), 100, 94, False, "-6.0%, allowed -5%"),
        (Wanted("rate", "/r", tolerance=10), 100, 94, True, ""),
        (Wanted("ms", "/r", higher_is_better=False), 10, 10.2, True, ""),
        (Wanted("ms", "/r", higher_is_better=False), 10, 12, False, "ms 10 → 12"),
        (Wanted("rate", "/r", floor=98), 100, 97, False, "the plan asks for at least 98"),
        (Wanted("ms", "/r", higher_is_better=False, floor=5), 4, 6, False, "the plan asks for at most 5"),
    ],
)
def test_direction_tolerance_and_floor(wanted: Wanted, before: float, after: float, ok: bool, says: str) -> None:
    (found,) = metrics.compare([wanted], runs(json.dumps({"r": before})), runs(json.dumps({"r": after})))
    assert found.ok is ok and says in found.sentence


def test_a_metric_missing_afterwards_fails_and_one_missing_before_is_said() -> None:
    wanted, good, none = [Wanted("rate", "/r")], runs('{"r": 5}'), runs("{}")
    (gone,), (new,) = metrics.compare(wanted, good, none), metrics.compare(wanted, none, good)
    assert not gone.ok and "rate is missing" in gone.sentence
    assert new.ok and "nothing to compare with" in new.sentence and "before the change" in new.sentence


# --- cards ---------------------------------------------------------------------------------------------------


def card(uuid: str, index: int = 0, link: str = "", slot: str = "", **values: float) -> dict[str, Any]:
    measured = {name: {"median": value, "spread": 0.01} for name, value in values.items()}
    said = {"rc": 0, "out": link and f"{uuid}, {link}\nGPU-other, 1, 5, 16, 16\n"}
    return {"index": index, "uuid": uuid, "pci": slot or SLOTS[uuid], "metrics": measured, "link": said}


def host(*cards: dict[str, Any]) -> dict[str, Any]:
    return {"ok": True, "cards": list(cards)}


def test_a_sentence_names_card_slot_numbers_tolerance_and_noise() -> None:
    (found,) = benchmark.compare(host(card(A, h2d=54.0)), host(card(A, h2d=27.0)))
    assert found.sentence == (
        f"card 0 ({A} at 0000:1b:00.0): host to device 54 GB/s → 27 GB/s (-50.0%, allowed -5%, noise 1% and 1%)"
    )


def test_noise_excuses_up_to_a_quarter_only() -> None:
    def measured(value: float) -> dict[str, Any]:
        return host({"index": 0, "uuid": A, "metrics": {"h2d": {"median": value, "spread": 0.9}}})

    assert benchmark.compare(measured(100), measured(80))[0].ok
    assert not benchmark.compare(measured(100), measured(70))[0].ok


def test_a_new_card_is_held_against_the_floor_and_a_kept_one_against_both() -> None:
    old, new = host(card(A, h2d=54.0, fp32=60_000)), host(card(B, slot=SLOTS[A], h2d=40.0, fp32=59_000))
    assert benchmark.failed(benchmark.compare(old, new))  # without a floor: as fast as what stood in its slot
    found = benchmark.compare(old, new, floors={"h2d": 35.0})
    assert [(row.metric, row.ok) for row in found] == [("fp32", True), ("h2d", True)]
    (low,) = benchmark.failed(benchmark.compare(old, new, floors={"h2d": 50.0}))
    assert low == f"card 0 ({B} at 0000:1b:00.0): host to device 40 GB/s, the plan asks for at least 50 GB/s"
    kept = benchmark.compare(old, host(card(A, h2d=40.0, fp32=60_000)), floors={"h2d": 35.0})
    assert [row.ok for row in kept if row.metric == "h2d"] == [False, True]


def test_a_floor_for_a_metric_that_was_not_measured_fails_but_a_lone_card_has_no_peer() -> None:
    assert benchmark.failed(benchmark.compare({}, host(card(A, h2d=1.0)), floors={"fp32": 1.0}))
    assert not benchmark.failed(benchmark.compare({}, host(card(A, h2d=1.0)), floors={"peer": 1.0}))
    (late,) = benchmark.failed(benchmark.compare({}, host(card(A, launch=9.0)), floors={"launch": 4.0}))
    assert "at most 4 µs" in late


@pytest.mark.case("link-trained-low-silent-slowdown")
@pytest.mark.parametrize(
    ("before", "after", "fine", "says"),
    [
        ("5, 5, 16, 16", "5, 5, 16, 16", True, "link Gen5 x16 under load"),
        ("5, 5, 16, 16", "2, 5, 16, 16", False, "link Gen2 x16 under load, was Gen5 x16"),
        ("5, 5, 16, 16", "5, 5, 8, 16", False, "link Gen5 x8 under load, was Gen5 x16"),
        ("4, 5, 16, 16", "4, 5, 16, 16", True, "link Gen4 x16"),  # the slot cannot do more, and never did
        ("", "2, 5, 16, 16", False, "it can do Gen5 x16"),
        ("5, 5, 16, 16", "[N/A], 5, 16, 16", False, "nvidia-smi does not tell"),
    ],
)
def test_links_are_compared_under_load(before: str, after: str, fine: bool, says: str) -> None:
    ((ok, sentence),) = benchmark.links(host(card(A, link=before)), host(card(A, link=after)))
    assert ok is fine and says in sentence and A in sentence


def test_a_link_that_nobody_tells_of_says_nothing() -> None:
    assert benchmark.links(host(card(A)), host(card(A))) == []


# --- stress --------------------------------------------------------------------------------------------------


def row(uuid: str, temperature: str = "60", bad: str = "0", fixed: str = "0", reasons: str = "0x0") -> str:
    return f"{uuid}, 00000000:{SLOTS[uuid][5:].upper()}, {temperature}, {bad}, {fixed}, {reasons}, 690.10, 1755"


def stressed(*looks: str, **more: Any) -> dict[str, Any]:
    cards = [{"index": i, "uuid": uuid, "pci": SLOTS[uuid], "ok": True, "rounds": 9} for i, uuid in enumerate((A, B))]
    samples = [{"at": i, "rc": 0, "out": out, "hung": False} for i, out in enumerate(looks)]
    return {"ok": True, "seconds": 60, "load": "built-in", "cards": cards, "samples": samples, **more}


FINE = f"{row(A)}\n{row(B)}\n"
LIMITS = stress.Limits(90, frozenset({13, 31, 43, 45}), (A, B))
NAMED = f"card 1 ({B} at 0000:43:00.0)"


def test_a_good_run_says_what_was_loaded_and_fails_nothing() -> None:
    judged = stress.judge(stressed(FINE, FINE), LIMITS)
    assert judged.failures == ()
    assert judged.notes[0] == "stress: 2 card(s) loaded for 60 s by built-in"
    assert f"stress: {NAMED}: 9 rounds right, at most 60 °C, 690 W" in judged.notes


def log(*lines: str) -> dict[str, Any]:
    return {"source": "journal", "text": "\n".join(lines), "why": ""}


XID = "[ 10.1] gpu1 kernel: NVRM: Xid (PCI:0000:43:00): {}, pid=1, name=x"
KILLED = "[ 9.9] gpu1 kernel: Out of memory: Killed process 4711 (python3) total-vm:1kB"


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (stressed(FINE, f"{row(A)}\n{row(B, temperature='97')}\n"), f"{NAMED}: 97 °C, at most 90 °C"),
        (stressed(FINE, f"{row(A)}\n{row(B, bad='3')}\n"), f"{NAMED}: 3 uncorrectable memory errors"),
        (stressed(FINE, f"{row(A)}\n{row(B, reasons='0x40')}\n"), f"{NAMED}: clocks slowed down by heat (hardware"),
        (stressed(f"{row(A)}\n{row(B, reasons='0x00000080')}\n"), f"{NAMED}: clocks slowed down by power brake"),
        (stressed(FINE, log=log(XID.format(48))), f"{NAMED}: Xid 48 (double-bit memory error)"),
        (stressed(FINE, log=log(XID.format(31)), log_load=log(XID.format(31))), "Xid 31 (memory page fault"),
        (stressed(FINE, log_load=log(KILLED)), "the kernel killed python3 (4711)"),
        (stressed(FINE, nccl={"ok": False, "why": "rank 1: 5 wrong sums"}), "NCCL all-reduce failed: rank 1"),
        ({**stressed(FINE), "samples": [{"rc": None, "out": "", "hung": True}]}, "nvidia-smi hung 1 of 1 times"),
        ({**stressed(FINE), "samples": [{"rc": 255, "out": "Unable to determine"}]}, "nvidia-smi ended with 255"),
        ({"ok": False, "why": "cuInit: no device", "cards": []}, "no card could be loaded: cuInit: no device"),
    ],
)  # fmt: skip
def test_each_fault_is_named(result: dict[str, Any], says: str) -> None:
    judged = stress.judge(result, LIMITS)
    assert any(says in line for line in judged.failures), judged


@pytest.mark.case("fell-off-bus-without-xid-number")
def test_a_loss_without_the_word_xid_is_named_by_card_and_an_earlier_boots_does_not_count() -> None:
    words = (
        "[ 5.0] gpu1 kernel: NVRM: The NVIDIA GPU 0000:43:00.0",
        "               NVRM: (PCI ID: 10de:26b5) installed in this system has",
        "               NVRM: fallen off the bus and is not responding to commands.",
    )
    (line,) = stress.judge(stressed(FINE, log=log(*words)), LIMITS).failures
    assert line == f"kernel log: {NAMED} fell off the bus (no Xid line)"
    assert stress.judge(stressed(FINE, log=log(*words, "-- Boot 0123 --", "quiet")), LIMITS).failures == ()


def test_a_programs_xid_of_before_the_load_is_told_only() -> None:
    judged = stress.judge(stressed(FINE, log=log(XID.format(43))), LIMITS)
    assert judged.failures == () and any("Xid 43" in line and line.endswith("accepted") for line in judged.notes)


def test_a_power_cap_under_load_is_told_only() -> None:
    judged = stress.judge(stressed(f"{row(A, reasons='0x4')}\n{row(B)}\n"), LIMITS)
    assert judged.failures == () and any("at its power cap in 1 of 1 looks" in line for line in judged.notes)


def test_a_card_that_was_not_loaded_is_missed() -> None:
    result = stressed(FINE)
    result["cards"].pop()
    assert stress.judge(result, LIMITS).failures == (f"stress: {B} was not among the cards that could be loaded",)


@given(st.text(max_size=200))
def test_any_answer_of_nvidia_smi_is_read(out: str) -> None:
    stress.readings({"out": out})
    stress.judge(stressed(out), LIMITS)


WORDS = ["cards", "runs", "samples", "ok", "why", "log", "log_load", "nccl", "text", "hung"]
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12) | st.just("x" * 140_000),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [*WORDS, "uuid", "pci", "index", "metrics", "h2d", "median", "spread", "link", "rc", "out"]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)
bodies = st.none() | st.dictionaries(st.sampled_from(WORDS), anything)


@given(bodies, bodies, bodies, bodies)
@example(None, None, {"cards": [{"uuid": []}]}, None)
def test_whatever_a_host_reports_is_judged(bench: Any, command: Any, stressed: Any, before: Any) -> None:
    said = MeasureReport(state="done", bench=bench, command=command, stress=stressed)
    plan = {"baseline": {"command": ["x"], "metrics": [{"name": "m", "pointer": "/r"}], "floors": {"h2d": 4.0}}}
    last = {"baseline/gpu": {"bench": before, "command": command}}
    for provider, params in ((BASELINE, plan["baseline"]), (SPEED, {"stress": {"for": 1}, "tolerance": 5.0})):
        view = HostView("gpu1", plan, params, last=last)
        assert provider.judge(view, said).outcome in ("accept", "reject", "hold")
