"""What a change comes to: each host's word, the exit code, and what a resume takes up untold."""

from __future__ import annotations

import pytest

from gpuchange.planner import Limits, Start, decide, exit_code, resumable, summary
from gpuchange.states import Kind
from tests.planning import AS_WANTED, GONE, HOLD, REJECT, again, answer, fresh, left, turn, upto
from tests.simulate import Outcome, Simulation, full_table, intents, simulated


@pytest.mark.parametrize(
    ("lines", "word", "code"),
    [
        ({}, "done", 0),
        ({("h0", "preflight do apply"): [AS_WANTED]}, "as wanted", 0),
        ({("h0", "preflight do apply"): [REJECT]}, "failed before change", 1),
        ({("h0", "preflight do apply"): [GONE]}, "failed before change", 4),
        ({("h0", "backup do apply"): [GONE]}, "failed before change", 4),
        ({("h0", "preflight do apply"): [HOLD]}, "held: preflight", 1),
        ({("h0", "stack do apply"): [REJECT]}, "rolled back", 3),
        ({("h0", "stack do apply"): [HOLD]}, "held: stack", 5),
        ({("h0", "stack do apply"): [REJECT], ("h0", "seal undo undo"): [REJECT]}, "held: seal", 6),
        ({("h0", "stack do apply"): [REJECT], ("h0", "seal undo undo"): [HOLD]}, "held: seal", 5),
        (
            {("h0", "backup do apply"): [Outcome(kind=Kind.HELD, data={"why": "x", "refused": {"kind": "locked"}})]},
            "held: backup",
            7,
        ),
        (
            {("h0", "stack do apply"): [Outcome(kind=Kind.HELD, data={"why": "x", "refused": {"kind": "locked"}})]},
            "held: stack",
            5,
        ),
    ],
)
def test_each_end_has_its_word_and_its_code(lines: dict[tuple[str, str], list[Outcome]], word: str, code: int) -> None:
    run = simulated(1, lines)
    assert (summary(run.state), exit_code(run.state)) == ({"h0": word}, code)


def test_a_host_on_its_way_has_a_word_for_where_it_is() -> None:
    state = fresh(6)
    upto(state, "h1", "record")
    upto(state, "h2", "stack")
    for intent in intents(Start(("h3",), "preflight", "host", "do", "apply")):
        state.apply(intent)
    upto(state, "h4", "stack", REJECT)
    upto(state, "h5", "verify")
    state.apply(turn("h5"))
    assert summary(state) == {
        "h0": "pending",
        "h1": "in service",
        "h2": "out: stack",
        "h3": "in service",
        "h4": "failed: stack",
        "h5": "going back: stack",
    }


def test_a_host_left_is_called_so_whatever_else_it_is() -> None:
    run = simulated(2, {("h0", "stack do apply"): [HOLD]})
    assert again(run, left("h0")) == 5  # left out of service
    assert summary(run.state)["h0"] == "left"


@pytest.mark.parametrize(
    ("one", "other", "code"),
    [
        ({("h0", "stack do apply"): [REJECT]}, {("h1", "stack do apply"): [HOLD]}, 5),
        (
            {("h0", "stack do apply"): [REJECT], ("h0", "seal undo undo"): [REJECT]},
            {("h1", "stack do apply"): [HOLD]},
            6,
        ),
        ({("h0", "stack do apply"): [REJECT]}, {("h1", "backup do apply"): [GONE]}, 3),
        ({("h0", "backup do apply"): [GONE]}, {("h1", "backup do apply"): [REJECT]}, 4),
    ],
)
def test_the_worst_of_several_ends_counts(
    one: dict[tuple[str, str], list[Outcome]], other: dict[tuple[str, str], list[Outcome]], code: int
) -> None:
    run = simulated(2, one | other, max_unavailable=2, stop_after_failures=9)
    assert exit_code(run.state) == code


def test_what_failed_by_itself_or_was_taken_up_is_not_resumed_untold() -> None:
    gone = Outcome(kind=Kind.HELD, data={"why": "no route", "unreachable": True})
    refused = Outcome(kind=Kind.HELD, data={"why": "x", "refused": {"kind": "locked"}})
    lines = {
        ("h0", "stack do apply"): [HOLD],
        ("h1", "stack do apply"): [refused],
        ("h2", "stack do apply"): [gone],
        ("h3", "preflight do apply"): [Outcome()],
        ("h4", "verify do apply"): [REJECT],
        ("h4", "seal undo undo"): [refused],
    }
    run = simulated(5, lines, max_unavailable=5, stop_after_failures=9)
    found = {(host, step.phase.name, direction) for host, step, direction in resumable(run.state)}
    assert found == {("h1", "stack", "do"), ("h2", "stack", "do"), ("h4", "seal", "undo")}


def test_a_failed_step_of_a_touched_host_is_not_resumed_but_waits_for_its_answer() -> None:
    run = simulated(1, {("h0", "stack do apply"): [REJECT]}, on_failure="hold")
    assert resumable(run.state) == () and summary(run.state) == {"h0": "failed: stack"}
    gone = simulated(1, {("h0", "stack do apply"): [GONE]}, on_failure="hold")
    assert [(host, step.key, way) for host, step, way in resumable(gone.state)] == [("h0", ("stack", "apt"), "do")]
    assert again(gone, answer(Kind.RETRY, "h0", "stack", "apt")) == 0


def test_a_simulation_without_hosts_is_finished() -> None:
    run = Simulation(full_table(), [], Limits(), lambda _s, _h: Outcome())
    assert run.run().finished and exit_code(run.state) == 0 and summary(run.state) == {}


def test_only_back_starts_nothing_but_on_hosts_that_were_turned() -> None:
    state = fresh(3)
    for host, phase in (("h0", "seal"), ("h1", "seal"), ("h2", "record")):
        upto(state, host, phase)
    state.apply(turn("h0"))
    decision = decide(state, Limits(3), 0.0, only_back=True)
    assert [(start.hosts, start.direction) for start in decision.starts] == [(("h0",), "undo")]
    assert {host for start in decide(state, Limits(3), 0.0).starts for host in start.hosts} == {"h0", "h1", "h2"}
