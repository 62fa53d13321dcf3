"""A card changed by hand: which one is meant, what came back, who still names the old one; where the work stands."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuchange.checks import card_swap, cards, references
from gpuchange.checks.card_swap import Comes, Swap
from gpuchange.checks.cards import Card, Smi
from gpuchange.plan import PlanError, load
from gpuchange.providers.change import manual
from gpuchange.providers.change.manual import PROVIDER, CardReport
from gpuchange.providers.contract import HostView
from gpuchange.providers.preflight import manual as preflight
from gpuchange.providers.verify import host as verify
from gpuchange.reports import Verdict

TWO_H100 = json.loads((Path(__file__).parent / "cases" / "facts" / "two_h100.json").read_text())
OLD_UUID, OLD_SERIAL = "GPU-31a2bfdf-15d0-474c-82ab-b54f7a38d385", "1615144466230"
OTHER_UUID = "GPU-2a1e4c9d-3a92-4b5a-baed-69ab1c6b0978"
NEW_UUID, NEW_SERIAL = "GPU-99999999-15d0-474c-82ab-b54f7a38d385", "1650000000001"
SLOT, OTHER = "0000:1b:00.0", "0000:43:00.0"
BUS = (SLOT, OTHER)


def smi(*found: Card) -> Smi:
    return Smi(ok=True, cards=found)


BEFORE = cards.parse(TWO_H100["smi"])
OLD, KEPT = BEFORE.cards
NEW = OLD.model_copy(update={"uuid": NEW_UUID, "serial": NEW_SERIAL})
TO_DO = Swap(SLOT, OLD, Comes(serial=NEW_SERIAL))


# ---------------------------------------------------------------------------------------------- which card is meant


@pytest.mark.parametrize("goes", [OLD_SERIAL, OLD_UUID, SLOT, "00000000:1B:00.0", "1b:00.0"])
def test_a_card_is_meant_by_serial_uuid_or_slot(goes: str) -> None:
    found = card_swap.resolve([{"goes": goes, "comes": {"serial": NEW_SERIAL}}], BEFORE, BUS)
    assert (found.swaps, found.problems) == ((TO_DO,), ())


def test_a_card_that_is_not_there_is_refused_with_those_that_are() -> None:
    (problem,) = card_swap.resolve([{"goes": "42"}], BEFORE, BUS).problems
    assert problem.startswith("no card is 42; there are: 0000:1b:00.0 serial 1615144466230")


def test_a_card_that_does_not_answer_is_meant_by_its_slot_only() -> None:
    dead = Smi(why="nvidia-smi ended with 255: Unable to determine the device handle")
    found = card_swap.resolve([{"goes": SLOT}], dead, BUS)
    assert found.swaps == (Swap(SLOT, None, Comes()),)
    (problem,) = card_swap.resolve([{"goes": OLD_SERIAL}], dead, BUS).problems
    assert "name the slot" in problem


def test_a_card_that_came_already_needs_no_hands() -> None:
    entry = {"goes": OLD_SERIAL, "comes": {"serial": NEW_SERIAL}}
    found = card_swap.resolve([entry], smi(NEW, KEPT), BUS)
    assert (found.swaps, len(found.in_place), found.problems) == ((), 1, ())


def test_two_entries_for_one_slot_and_a_card_in_the_wrong_place_are_refused() -> None:
    assert card_swap.resolve([{"goes": SLOT}, {"goes": OLD_UUID}], BEFORE, BUS).problems == (
        f"slot {SLOT} is named twice",
    )
    elsewhere = NEW.model_copy(update={"bus_id": OTHER})
    (problem,) = card_swap.resolve(
        [{"goes": OLD_SERIAL, "comes": {"serial": NEW_SERIAL}}], smi(OLD, elsewhere), BUS
    ).problems
    assert "is in slot 0000:43:00.0 already" in problem


# ------------------------------------------------------------------------------------------------- what came back


def judged(*found: Card, swaps: tuple[Swap, ...] = (TO_DO,), on_bus: tuple[str, ...] = BUS) -> str:
    return "; ".join(card_swap.judge(swaps, BEFORE, smi(*found), on_bus, BUS).problems)


def test_the_card_that_was_announced_is_fine_and_described() -> None:
    found = card_swap.judge((TO_DO,), BEFORE, smi(NEW, KEPT), BUS, BUS)
    assert found.problems == ()
    assert found.notes == (
        f"slot {SLOT}: serial {NEW_SERIAL} ({NEW_UUID}, NVIDIA H100 80GB HBM3), VBIOS 96.00.74.00.11, link x16 of x16, "
        "81559 MiB",
    )


WRONG: dict[str, tuple[tuple[Card, ...], tuple[str, ...], str]] = {
    "old card still there": ((OLD, KEPT), BUS, f"slot {SLOT} still holds serial {OLD_SERIAL}"),
    "another serial": (
        (NEW.model_copy(update={"serial": "7"}), KEPT),
        BUS,
        f"slot {SLOT} holds the wrong card {NEW_UUID}: serial 7, expected {NEW_SERIAL}",
    ),
    "another model": (
        (NEW.model_copy(update={"name": "NVIDIA L4"}), KEPT),
        BUS,
        "model NVIDIA L4, expected NVIDIA H100 80GB HBM3",
    ),
    "not seated": ((KEPT,), (OTHER,), f"slot {SLOT} has no working card (it is not on the PCI bus); expected serial"),
    "not initialised": ((KEPT,), BUS, f"slot {SLOT} has no working card (it is on the PCI bus but not initialised)"),
    "in the wrong slot": (
        (NEW.model_copy(update={"bus_id": "0000:52:00.0"}), KEPT),
        BUS,
        f"serial {NEW_SERIAL} ({NEW_UUID}, NVIDIA H100 80GB HBM3) sits in slot 0000:52:00.0",
    ),
    "one too many": (
        (NEW, KEPT, KEPT.model_copy(update={"bus_id": "0000:52:00.0", "uuid": "GPU-x"})),
        BUS,
        "card GPU-x at 0000:52:00.0 was not there before",
    ),
    "another card gone too": ((NEW,), (SLOT,), f"1 of 2 GPUs; missing {OTHER_UUID} ({OTHER}), not on the PCI bus"),
    "another card swapped": (
        (NEW, KEPT.model_copy(update={"uuid": "GPU-y"})),
        BUS,
        f"card at {OTHER}: uuid should be {OTHER_UUID}, is GPU-y",
    ),
    "half width": (
        (NEW.model_copy(update={"link_width": "8x"}), KEPT),
        BUS,
        f"slot {SLOT}: link of {NEW_UUID} is x8, expected x16: reseat it",
    ),
    "neighbour knocked loose": (
        (NEW, KEPT.model_copy(update={"link_width": "4x"})),
        BUS,
        f"slot {OTHER}: link of {OTHER_UUID} is x4, expected x16",
    ),
    "slower link": (
        (NEW.model_copy(update={"link_gen_max": "3"}), KEPT),
        BUS,
        f"slot {SLOT}: link of {NEW_UUID} reaches generation 3 only, expected 5",
    ),
    "less memory": (
        (NEW.model_copy(update={"memory": "40960 MiB"}), KEPT),
        BUS,
        f"slot {SLOT}: {NEW_UUID} has 40960 MiB of memory, expected 81559 MiB",
    ),
}


@pytest.mark.case("gpu-short-after-reboot-node-returned")
@pytest.mark.parametrize(("found", "on_bus", "says"), WRONG.values(), ids=list(WRONG))
def test_what_is_not_as_announced_is_named_by_slot_and_uuid(found: Any, on_bus: Any, says: str) -> None:
    assert says in judged(*found, on_bus=on_bus)


def test_an_idle_link_that_lowered_its_speed_is_no_fault() -> None:
    assert judged(NEW.model_copy(update={"link_gen": "1"}), KEPT) == ""


def test_a_neighbour_that_was_narrow_before_is_not_blamed_on_the_hands() -> None:
    narrow = KEPT.model_copy(update={"link_width": "8x"})
    assert card_swap.judge((TO_DO,), smi(OLD, narrow), smi(NEW, narrow), BUS, BUS).problems == ()


@pytest.mark.case("one-dead-card-hides-all-from-smi")
def test_cards_that_cannot_be_read_are_named_by_the_one_that_hides_them() -> None:
    said = {"rc": 255, "out": "Unable to determine the device handle for GPU0000:1B:00.0: Unknown Error\n", "err": ""}
    (problem,) = card_swap.judge((TO_DO,), BEFORE, cards.parse(said), BUS, BUS).problems
    assert "no answer from 0000:1b:00.0" in problem


def test_another_vbios_is_worth_a_note_and_a_hold_only_if_the_plan_names_one() -> None:
    newer = NEW.model_copy(update={"vbios": "96.00.99.00.01"})
    found = card_swap.judge((TO_DO,), BEFORE, smi(newer, KEPT), BUS, BUS)
    assert found.problems == ()
    assert f"slot {SLOT}: VBIOS was 96.00.74.00.11, is 96.00.99.00.01" in found.notes
    wanted = (Swap(SLOT, OLD, Comes(serial=NEW_SERIAL, vbios="96.00.74.00.11")),)
    assert "VBIOS 96.00.99.00.01, expected 96.00.74.00.11" in judged(newer, KEPT, swaps=wanted)


def test_the_way_back_wants_the_very_same_card() -> None:
    back = card_swap.back((TO_DO,))
    assert judged(OLD, KEPT, swaps=back) == ""
    assert f"UUID {NEW_UUID}, expected {OLD_UUID}" in judged(NEW, KEPT, swaps=back)


# -------------------------------------------------------------------------------------- who names a card by its UUID


ROWS = [
    {"name": OLD_UUID, "file": "/etc/docker/daemon.json", "line": 12},
    {"name": "GPU-31a2bfdf", "file": "/etc/systemd/system/m.service.d/gpu.conf", "line": 2},
    {"name": OTHER_UUID, "file": "/etc/slurm/gres.conf", "line": 3},
    {"name": "GPU-0badcafe", "file": "/etc/default/old", "line": 1},
]


@pytest.mark.case("swapped-card-leaves-dead-uuid-in-configs")
def test_a_name_that_means_no_card_is_stale_also_when_it_is_cut_short() -> None:
    named = references.parse(ROWS)
    assert [each.file for each in references.to_cards(named, [OLD_UUID])] == [
        "/etc/systemd/system/m.service.d/gpu.conf",
        "/etc/docker/daemon.json",
    ]
    dead = references.stale(named, [NEW_UUID, OTHER_UUID])
    assert {each.file for each in dead} == {row["file"] for row in ROWS} - {"/etc/slurm/gres.conf"}
    assert f"old UUID still referenced in /etc/docker/daemon.json:12 ({OLD_UUID})" in references.sentences(
        dead, "old UUID still referenced in"
    )


def test_many_places_are_counted_not_listed() -> None:
    named = references.parse([{"name": "GPU-1234", "file": f"/f{n}", "line": 1} for n in range(30)])
    assert references.sentences(named, "in")[-1] == "and in 10 more places"


KEYS = st.sampled_from(["name", "file", "line"])
JUNK = st.recursive(
    st.none() | st.text() | st.integers() | st.floats(), lambda kids: st.lists(kids) | st.dictionaries(KEYS, kids)
)


@settings(max_examples=200, deadline=None)
@given(JUNK)
def test_strange_rows_are_left_out(rows: Any) -> None:
    assert all(isinstance(each, references.Reference) for each in references.parse(rows))


# ------------------------------------------------------------------------------------------------ where it stands


PARAMS = {
    "provider": "manual",
    "cards": [{"goes": SLOT, "comes": {"serial": NEW_SERIAL}}],
    "off_within": 60,
    "confirm_within": 3600,
    "return_within": 300,
    "settle": 30,
    "stale_references": "hold",
}


def facts(found: Smi | None = None, **more: Any) -> dict[str, Any]:
    """The facts of the host with two H100, the card in SLOT replaced by the new one if `found` has it."""
    made = json.loads(json.dumps(TWO_H100))
    if found is not None and found.cards and found.cards[0].uuid == NEW_UUID:
        out = made["smi"]["out"]
        made["smi"]["out"] = out.replace(OLD_UUID, NEW_UUID).replace(OLD_SERIAL, NEW_SERIAL)
    return {**made, **more}


VIEW = HostView(
    host="gpu1",
    plan={"change": [PARAMS]},
    params=PARAMS,
    last={"seal/host": {"facts": facts()}, "preflight/manual": {"facts": facts(), "references": ROWS}},
)


def told(stage: str, **fields: Any) -> CardReport:
    return CardReport.model_validate({"state": "done" if stage == "looked" else "running", "stage": stage, **fields})


def verdict(view: HostView, report: CardReport) -> Verdict:
    return PROVIDER.judge(view, report)


AWAY = told("away", heard=("ssh: no answer", "ping: no answer", "watched for 20 s"))
BACK = told("looked", facts=facts(smi(NEW, KEPT)), ordered_boot="b0", references=ROWS[2:])


def test_it_powers_off_only_what_is_not_in_place_and_never_once_confirmed() -> None:
    made = PROVIDER.args(VIEW, "apply")
    assert made["goal"] == [{"slot": SLOT, "serial": NEW_SERIAL, "other_than": OLD_UUID}]
    assert (made["confirmed"], made["knock"]["expected"]) == (False, False)
    waiting = replace(VIEW, memo={"stage": "asked", "since": 0.0, "retries": 0}, confirmed=True)
    made = PROVIDER.args(waiting, "apply")
    assert (made["confirmed"], made["knock"]["expected"], made["knock"]["window"]) == (True, True, 0)


def test_a_host_that_shuts_down_is_waited_for_and_then_held() -> None:
    first = verdict(VIEW, told("ordered", ordered_boot="b0"))
    assert (first.outcome, first.asks) == ("again", ())
    late = replace(VIEW, memo=first.memo or {}, waited=60.0)
    assert verdict(late, told("ordered", ordered_boot="b0")).outcome == "hold"


def test_seen_off_the_operator_is_told_which_card_in_which_slot_of_which_host() -> None:
    asked = verdict(VIEW, AWAY)
    assert asked.outcome == "again"
    assert "gpu1 is off (ssh: no answer; ping: no answer; watched for 20 s)" in asked.why
    text = "\n".join(asked.asks)
    assert "make sure that it has no power" in text
    assert f"take the card out of slot {SLOT}: serial {OLD_SERIAL} ({OLD_UUID}, NVIDIA H100 80GB HBM3)" in text
    assert f"put into slot {SLOT}: serial {NEW_SERIAL}" in text


@pytest.mark.case("bmc-says-success-host-still-on")
def test_nobody_is_told_to_open_a_host_while_any_source_says_on() -> None:
    doubt = told("doubtful", heard=("ssh: no answer", "ping: no answer", "ipmitool: Chassis Power is on"))
    found = verdict(VIEW, doubt)
    assert (found.outcome, found.asks) == ("again", ())
    assert "NOT safe to open gpu1" in found.why and "Chassis Power is on" in found.why
    held = verdict(replace(VIEW, memo=found.memo or {}, waited=60.0), doubt)
    assert held.outcome == "hold" and "NOT safe to open" in held.why
    on_again = verdict(VIEW, BACK)
    assert on_again.outcome == "again" and "NOT safe to open" in on_again.why


def test_waiting_for_hands_and_for_the_host_is_bounded() -> None:
    asked = replace(VIEW, memo=verdict(VIEW, AWAY).memo or {}, waited=3600.0)
    assert "nobody has confirmed the work on gpu1" in verdict(asked, AWAY).why
    confirmed = replace(VIEW, confirmed=True, waited=40.0)
    waiting = verdict(confirmed, AWAY)
    assert (waiting.outcome, waiting.asks) == ("again", ())
    late = replace(confirmed, memo=waiting.memo or {}, waited=340.0)
    assert verdict(late, AWAY).outcome == "hold"
    retried = replace(late, retries=1, waited=0.0)
    assert verdict(retried, AWAY).outcome == "again", "an operator's retry begins the time anew"


def test_the_right_card_is_accepted_and_nothing_is_left_to_ask() -> None:
    found = verdict(replace(VIEW, confirmed=True), BACK)
    assert found.outcome == "accept", found
    assert any(NEW_UUID in line for line in found.findings)
    assert "named no card before either: /etc/default/old:1 (GPU-0badcafe)" in found.findings


@pytest.mark.case("swapped-card-leaves-dead-uuid-in-configs")
def test_a_dead_uuid_in_a_file_holds_the_host_by_file_and_line() -> None:
    report = told("looked", facts=facts(smi(NEW, KEPT)), ordered_boot="b0", references=ROWS)
    found = verdict(replace(VIEW, confirmed=True), report)
    assert found.outcome == "hold"
    assert f"old UUID still referenced in /etc/docker/daemon.json:12 ({OLD_UUID})" in found.why
    assert "write the new UUID there, then resolve --retry" in found.why
    reporting = {**PARAMS, "stale_references": "report"}
    told_only = verdict(replace(VIEW, confirmed=True, params=reporting), report)
    assert told_only.outcome == "accept"
    assert any("/etc/docker/daemon.json:12" in line for line in told_only.findings)


def test_the_old_card_back_in_is_held_and_a_host_that_was_never_off_too() -> None:
    same = told("looked", facts=facts(), ordered_boot="b0", references=ROWS)
    found = verdict(replace(VIEW, confirmed=True), same)
    assert found.outcome == "hold" and f"slot {SLOT} still holds" in found.why
    assert "power gpu1 off, put it right" in found.why
    never = verdict(replace(VIEW, confirmed=True), told("ordered", ordered_boot="b0"))
    assert never.outcome == "hold" and "has not been off" in never.why


def test_cards_get_time_to_answer_after_the_boot() -> None:
    quiet = {**facts(), "smi": {"rc": 9, "out": "NVIDIA-SMI has failed", "err": ""}}
    report = told("looked", facts=quiet, ordered_boot="b0")
    confirmed = replace(VIEW, confirmed=True)
    waiting = verdict(confirmed, report)
    assert waiting.outcome == "again"
    assert verdict(replace(confirmed, memo=waiting.memo or {}, waited=30.0), report).outcome == "hold"


def test_another_machine_that_answers_is_held() -> None:
    report = told("looked", facts=facts(smi(NEW, KEPT), machine_id="f" * 32), ordered_boot="b0")
    assert "this is another machine" in verdict(replace(VIEW, confirmed=True), report).why


def test_the_way_back_asks_for_the_old_card_and_accepts_no_other() -> None:
    view = replace(VIEW, direction="undo")
    assert PROVIDER.args(view, "undo")["goal"] == [{"slot": SLOT, "serial": OLD_SERIAL, "uuid": OLD_UUID}]
    asked = PROVIDER.judge_undo(view, AWAY)
    assert f"put into slot {SLOT}: serial {OLD_SERIAL}, {OLD_UUID}" in "\n".join(asked.asks)
    confirmed = replace(view, confirmed=True)
    assert PROVIDER.judge_undo(confirmed, BACK).outcome == "hold"
    old = told("looked", facts=facts(), ordered_boot="b1", references=ROWS)
    assert PROVIDER.judge_undo(confirmed, old).outcome == "accept"
    named = told("looked", facts=facts(), references=[*ROWS, {"name": NEW_UUID, "file": "/etc/default/m", "line": 4}])
    found = PROVIDER.judge_undo(confirmed, named)
    assert found.outcome == "hold" and "/etc/default/m:4" in found.why


def test_a_host_without_a_card_to_change_is_left_alone() -> None:
    view = replace(VIEW, host="gpu2", params={**PARAMS, "cards": [{**PARAMS["cards"][0], "host": "gpu1"}]})
    assert PROVIDER.args(view, "apply")["goal"] == []
    assert verdict(view, told("looked", facts=facts())).outcome == "accept"


def test_only_the_swapped_slot_may_show_another_card_to_verify() -> None:
    assert PROVIDER.may_change == ("gpu_uuid", "serial")
    assert manual.moves(VIEW) == {SLOT: ("gpu_uuid", "serial")}
    view = replace(VIEW, params={})
    assert verify.moves(view) == {SLOT: ("gpu_uuid", "serial")}


# ---------------------------------------------------------------------------------------------------- preflight, plan


def seen(**more: Any) -> CardReport:
    return told("looked", facts=facts(), references=ROWS, **more)


@pytest.mark.case("swapped-card-leaves-dead-uuid-in-configs")
def test_before_the_change_the_files_that_name_the_card_are_listed() -> None:
    lines = preflight.said(VIEW, seen())
    assert (
        f"slot {SLOT}: serial {OLD_SERIAL} ({OLD_UUID}, NVIDIA H100 80GB HBM3) goes, serial {NEW_SERIAL} comes"
        in lines[0]
    )
    assert "reversible by hands" in lines[0]
    assert f"the card that goes is named in /etc/docker/daemon.json:12 ({OLD_UUID})" in lines
    assert "names no card of this host: /etc/default/old:1 (GPU-0badcafe)" in lines


def test_a_card_that_is_not_there_stops_the_change_before_it_begins() -> None:
    params = {**PARAMS, "cards": [{"goes": "42"}]}
    found = preflight.judge(replace(VIEW, plan={"change": [params]}), seen())
    assert found.outcome == "reject" and "no card is 42" in found.why


def test_as_wanted_needs_every_coming_card_named() -> None:
    assert preflight.arrived(VIEW) == [NEW_SERIAL]
    unnamed = {**PARAMS, "cards": [{"goes": SLOT}]}
    assert preflight.arrived(replace(VIEW, plan={"change": [unnamed]})) is None


PLAN = """\
version: 1
name: card
reason: because
hosts: [gpu1]
change:
  - provider: manual
    cards: [{cards}]
    {more}
"""


def plan(tmp_path: Path, entry: str, more: str = "off_for: 20s") -> Any:
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN.replace("{cards}", entry).replace("{more}", more))
    return load(path)


def test_a_plan_brings_its_own_preflight(tmp_path: Path) -> None:
    found = plan(tmp_path, '{goes: "0000:1b:00.0", comes: {serial: "1650000000001"}}')
    assert [row.provider.name for row in found.chosen("preflight")] == ["host", "manual"]
    (chosen,) = found.chosen("change")
    assert chosen.params["cards"] == [{"goes": "0000:1b:00.0", "comes": {"serial": "1650000000001"}}]


@pytest.mark.parametrize(
    ("entry", "more", "says"),
    [
        ('{goes: "slot 3"}', "off_for: 20s", "neither a serial number nor a UUID nor a slot"),
        ("{goes: GPU-1}", "off_for: 2m", "longer than 40s"),
        ("{comes: {serial: 1}}", "off_for: 20s", "goes"),
    ],
)
def test_a_plan_that_names_no_card_is_refused(tmp_path: Path, entry: str, more: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        plan(tmp_path, entry, more)
