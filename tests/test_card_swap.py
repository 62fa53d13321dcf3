"""A card changed by hand: which one is meant, what came back, who still names the old one; where the work stands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuchange.checks import card_swap, cards, references
from gpuchange.checks.card_swap import Comes, Swap
from gpuchange.checks.cards import Card, Smi

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
