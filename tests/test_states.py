"""The transition table: what it lists, what it must not, and what going back has in common with going forward."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, astuple
from itertools import product

import pytest

from gpuchange.errors import IllegalTransition
from gpuchange.states import TRANSITIONS, Event, Kind, Status, after

IN_FLIGHT = {Status.DOING, Status.LOOKING, Status.UNDOING, Status.UNDO_LOOKING}
UNDO = {status for status in Status if status.value.startswith("undo") or status is Status.UNDONE}
INTENTS = {Kind.STARTED, Kind.PROBING}


def test_every_pair_not_listed_is_refused_and_says_where() -> None:
    refused = 0
    for status, direction, kind in product(Status, ("do", "undo", ""), Kind):
        event = Event(kind, "gpu1", "stack", "apt", direction, seq=7)
        if (status, direction, kind) in TRANSITIONS:
            assert after(status, event) is TRANSITIONS[status, direction, kind]
            continue
        refused += 1
        with pytest.raises(IllegalTransition, match="gpu1 stack/apt, event 7"):
            after(status, event)
    assert refused > len(TRANSITIONS)


def test_an_intent_leads_into_flight_and_only_an_intent_does() -> None:
    for (_, _, kind), status in TRANSITIONS.items():
        assert (kind in INTENTS) == (status in IN_FLIGHT)


def test_nothing_in_flight_can_begin_again_without_an_outcome() -> None:
    """No step is started twice: whatever is in flight must first be answered or lost."""
    for status, direction in product(IN_FLIGHT, ("do", "undo")):
        assert not {(status, direction, kind) for kind in INTENTS} & TRANSITIONS.keys()


def test_what_was_lost_is_probed_before_it_is_started() -> None:
    lost = {status for (_, _, kind), status in TRANSITIONS.items() if kind is Kind.LOST}
    assert lost == {Status.UNSURE, Status.UNDO_UNSURE}
    for status in lost:
        assert {kind for (of, _, kind) in TRANSITIONS if of is status} & INTENTS == {Kind.PROBING}


def test_everything_in_flight_can_be_lost() -> None:
    for status in IN_FLIGHT:
        direction = "undo" if status in UNDO else "do"
        assert (status, direction, Kind.LOST) in TRANSITIONS


def test_the_direction_of_an_event_is_the_direction_of_the_status_after() -> None:
    for (_, direction, _), status in TRANSITIONS.items():
        assert direction == ("undo" if status in UNDO else "do")


def test_what_is_undone_or_never_begun_is_not_undone_again() -> None:
    for status in (Status.UNDONE, Status.PENDING):
        assert not [key for key in TRANSITIONS if key[0] is status and key[1] == "undo"]


def test_a_probe_never_turns_a_step_round_and_an_unknown_one_is_not_undone() -> None:
    turned = {status for (status, _, _), then in TRANSITIONS.items() if then is Status.UNDOING and status not in UNDO}
    assert turned == {Status.DONE, Status.FAILED, Status.HELD, Status.WAITING}


def test_every_status_is_reached_and_every_held_one_can_be_answered() -> None:
    assert {Status.PENDING, *TRANSITIONS.values()} == set(Status)
    for status in (Status.HELD, Status.FAILED, Status.UNDO_HELD, Status.UNDO_FAILED):
        direction = "undo" if status in UNDO else "do"
        assert (status, direction, Kind.RETRY) in TRANSITIONS and (status, direction, Kind.MARKED) in TRANSITIONS


def test_the_words_in_journals_on_disk_stay_what_they_are() -> None:
    """A journal outlives the version that wrote it: renaming a word in the code must not rename it there."""
    steps = "started probing accepted rejected again not_done lost held retry marked"
    assert " ".join(Kind) == f"{steps} turned left created controller note ended"
    forward = "pending doing waiting unsure looking done failed held"
    back = "undoing undo_waiting undo_unsure undo_looking undone undo_failed undo_held"
    assert " ".join(Status) == f"{forward} {back}"


def test_an_event_says_nothing_that_it_was_not_told_and_cannot_be_changed() -> None:
    event = Event(Kind.NOTE)
    assert astuple(event) == (Kind.NOTE, "", "", "", "", "", {}, "", 0, "")
    with pytest.raises(FrozenInstanceError):
        event.host = "gpu1"  # type: ignore[misc]


def test_a_transition_that_is_refused_names_both_ends_and_the_way_out() -> None:
    event = Event(Kind.ACCEPTED, "gpu1", "stack", "apt", "undo", seq=7)
    with pytest.raises(IllegalTransition, match=r"accepted \(undo\) does not follow pending") as caught:
        after(Status.PENDING, event)
    assert "gpuchange audit verify" in caught.value.remedy


FORWARD = """
pending started doing
waiting started doing
doing accepted done
doing rejected failed
doing again waiting
doing held held
doing lost unsure
waiting rejected failed
waiting held held
unsure probing looking
unsure held held
looking accepted done
looking rejected failed
looking again waiting
looking not_done pending
looking held held
looking lost unsure
held retry unsure
failed retry unsure
held marked done
failed marked done
"""


def test_old_journals_fold_as_they_did() -> None:
    """Said a second time in plain words: a journal written under one table must fold alike under the next."""
    expected = {(status, "do", kind): then for status, kind, then in map(str.split, FORWARD.split("\n")[1:-1])}
    back = {"doing": "undoing", "done": "undone"}

    def undo(word: str) -> str:
        return back.get(word, f"undo_{word}")

    for (status, _, kind), then in list(expected.items()):
        if status != "pending":
            # an undo that a probe finds not done is an undo to be played again
            expected[undo(status), "undo", kind] = undo(then) if then != "pending" else "undo_waiting"
    expected |= {(status, "undo", "started"): "undoing" for status in ("done", "failed", "held", "waiting")}
    assert {key: str(then) for key, then in TRANSITIONS.items()} == expected
