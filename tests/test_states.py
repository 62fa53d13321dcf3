"""The transition table: what it lists, what it must not, and what going back has in common with going forward."""

from __future__ import annotations

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
