"""Where a card change by hand stands: told to power off, seen off, asked for hands, back, judged; and its preflight."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuchange.checks import fingerprint
from gpuchange.errors import PlanError
from gpuchange.plan import load
from gpuchange.providers.change import manual
from gpuchange.providers.change.manual import PROVIDER, CardReport
from gpuchange.providers.contract import HostView
from gpuchange.providers.preflight import manual as preflight
from gpuchange.providers.verify import host as verify
from gpuchange.reports import Verdict
from tests.test_card_swap import NEW_SERIAL, NEW_UUID, OLD_SERIAL, OLD_UUID, ROWS, SLOT, TWO_H100

PARAMS = {
    "provider": "manual",
    "cards": [{"goes": SLOT, "comes": {"serial": NEW_SERIAL}}],
    "off_within": 60,
    "confirm_within": 3600,
    "return_within": 300,
    "settle": 30,
    "stale_references": "hold",
}


def facts(swapped: bool = False, **more: Any) -> dict[str, Any]:
    """The facts of the host with two H100; `swapped`: the card in SLOT is the new one."""
    made = json.loads(json.dumps(TWO_H100))
    if swapped:
        out = made["smi"]["out"]
        made["smi"]["out"] = out.replace(OLD_UUID, NEW_UUID).replace(OLD_SERIAL, NEW_SERIAL)
    return {**made, **more}


VIEW = HostView(
    host="gpu1",
    plan={"change": [PARAMS]},
    params=PARAMS,
    last={"seal/host": {"facts": facts()}, "preflight/manual": {"seen": facts(), "references": ROWS}},
)


def told(stage: str, **fields: Any) -> CardReport:
    return CardReport.model_validate({"state": "done" if stage == "looked" else "running", "stage": stage, **fields})


def verdict(view: HostView, report: CardReport) -> Verdict:
    return PROVIDER.judge(view, report)


AWAY = told("away", heard=("ssh: no answer", "ping: no answer", "watched for 20 s"))
BACK = told("looked", seen=facts(True), ordered_boot="b0", references=ROWS[2:])


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
    report = told("looked", seen=facts(True), ordered_boot="b0", references=ROWS)
    found = verdict(replace(VIEW, confirmed=True), report)
    assert found.outcome == "hold"
    assert f"old UUID still referenced in /etc/docker/daemon.json:12 ({OLD_UUID})" in found.why
    assert "write the new UUID there, then resolve --retry" in found.why
    reporting = {**PARAMS, "stale_references": "report"}
    told_only = verdict(replace(VIEW, confirmed=True, params=reporting), report)
    assert told_only.outcome == "accept"
    assert any("/etc/docker/daemon.json:12" in line for line in told_only.findings)


def test_the_old_card_back_in_is_held_and_a_host_that_was_never_off_too() -> None:
    same = told("looked", seen=facts(), ordered_boot="b0", references=ROWS)
    found = verdict(replace(VIEW, confirmed=True), same)
    assert found.outcome == "hold" and f"slot {SLOT} still holds" in found.why
    assert "power gpu1 off, put it right" in found.why
    never = verdict(replace(VIEW, confirmed=True), told("ordered", ordered_boot="b0"))
    assert never.outcome == "hold" and "has not been off" in never.why


def test_cards_get_time_to_answer_after_the_boot() -> None:
    quiet = {**facts(), "smi": {"rc": 9, "out": "NVIDIA-SMI has failed", "err": ""}}
    report = told("looked", seen=quiet, ordered_boot="b0")
    confirmed = replace(VIEW, confirmed=True)
    waiting = verdict(confirmed, report)
    assert waiting.outcome == "again"
    assert verdict(replace(confirmed, memo=waiting.memo or {}, waited=30.0), report).outcome == "hold"


def test_another_machine_that_answers_is_held() -> None:
    report = told("looked", seen=facts(True, machine_id="f" * 32), ordered_boot="b0")
    assert "this is another machine" in verdict(replace(VIEW, confirmed=True), report).why


def test_the_way_back_asks_for_the_old_card_and_accepts_no_other() -> None:
    view = replace(VIEW, direction="undo")
    assert PROVIDER.args(view, "undo")["goal"] == [{"slot": SLOT, "serial": OLD_SERIAL, "uuid": OLD_UUID}]
    asked = PROVIDER.judge_undo(view, AWAY)
    assert f"put into slot {SLOT}: serial {OLD_SERIAL}, {OLD_UUID}" in "\n".join(asked.asks)
    confirmed = replace(view, confirmed=True)
    assert PROVIDER.judge_undo(confirmed, BACK).outcome == "hold"
    old = told("looked", seen=facts(), ordered_boot="b1", references=ROWS)
    assert PROVIDER.judge_undo(confirmed, old).outcome == "accept"
    named = told("looked", seen=facts(), references=[*ROWS, {"name": NEW_UUID, "file": "/etc/default/m", "line": 4}])
    found = PROVIDER.judge_undo(confirmed, named)
    assert found.outcome == "hold" and "/etc/default/m:4" in found.why


def test_a_host_without_a_card_to_change_is_left_alone() -> None:
    view = replace(VIEW, host="gpu2", params={**PARAMS, "cards": [{**PARAMS["cards"][0], "host": "gpu1"}]})
    assert PROVIDER.args(view, "apply")["goal"] == []
    assert verdict(view, told("looked", seen=facts())).outcome == "accept"


def test_only_the_swapped_slot_may_show_another_card_to_verify() -> None:
    assert PROVIDER.may_change == ("gpu_uuid", "serial")
    assert manual.moves(VIEW) == {SLOT: ("gpu_uuid", "serial")}
    view = replace(VIEW, params={})
    assert verify.moves(view) == {SLOT: ("gpu_uuid", "serial")}


LEAF = st.none() | st.booleans() | st.integers() | st.text(max_size=20)
KEYS = st.sampled_from(["smi", "pci", "rc", "out", "err", "address", "class", "machine_id", "boot_id", "name", "file"])
JUNK = st.recursive(
    LEAF, lambda kids: st.lists(kids, max_size=3) | st.dictionaries(KEYS, kids, max_size=4), max_leaves=8
)


@settings(max_examples=100, deadline=None)
@given(
    seen=st.dictionaries(KEYS, JUNK, max_size=4),
    rows=st.lists(JUNK, max_size=3),
    direction=st.sampled_from(["do", "undo"]),
)
def test_whatever_a_host_says_of_its_cards_it_is_judged(seen: Any, rows: Any, direction: Any) -> None:
    report = told("looked", seen=seen, references=rows, ordered_boot="b0")
    view = replace(
        VIEW, confirmed=True, direction=direction, waited=1e6, memo={"stage": "settle", "since": 0, "retries": 0}
    )
    assert PROVIDER.judge(view, report).outcome == "hold"
    preflight.judge(VIEW, report)


# ---------------------------------------------------------------------------------------------------- preflight, plan


def seen(**more: Any) -> CardReport:
    return told("looked", seen=facts(), references=ROWS, **more)


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


def test_a_look_at_the_cards_alone_takes_nothing_from_what_a_bundle_remembers_of_the_host() -> None:
    whole = {"facts": facts()}
    reports = {"preflight/host": whole, "preflight/manual": {"seen": facts(), "references": ROWS}}
    assert fingerprint.of_reports(reports, "preflight") == fingerprint.of(whole)
    assert "facts" not in CardReport.model_fields


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
