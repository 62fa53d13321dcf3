"""The planner before any change, with hosts that do not answer, with canaries, and under an operator's orders."""

from __future__ import annotations

import pytest

from gpuchange.errors import IllegalTransition
from gpuchange.phase import NOTHING_TO_UNDO, Phase, Play
from gpuchange.planner import Limits, Start, Table, decide, exit_code, resumable, summary
from gpuchange.states import Event, Kind
from tests.planning import (
    AS_WANTED,
    GONE,
    HOLD,
    REJECT,
    SILENT,
    UNREACHABLE,
    again,
    answer,
    drained,
    fresh,
    left,
    starts_of,
    told,
    turn,
)
from tests.simulate import Outcome, Simulation, full_table, intents, simulated

# -- before any change ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "code"), [({"h1": REJECT}, 1), ({"h1": HOLD}, 1), ({"h1": GONE}, 4), ({"h1": GONE, "h2": REJECT}, 4)]
)
def test_a_host_that_fails_preflight_ends_the_change_before_it_begins(said: dict[str, Outcome], code: int) -> None:
    run = simulated(4, {(host, "preflight do apply"): [outcome] for host, outcome in said.items()}, max_unavailable=4)
    assert not drained(run) and exit_code(run.state) == code
    assert not [event for event in run.events if event.phase == "record" and event.seq > 9]


def test_all_that_is_wrong_in_preflight_shows_at_once() -> None:
    wait = Outcome(kind=Kind.AGAIN, data={"after": 50.0, "waited": 50.0})
    run = simulated(2, {("h0", "preflight do apply"): [REJECT], ("h1", "preflight do apply"): [wait, REJECT]})
    assert summary(run.state) == {"h0": "failed before change", "h1": "failed before change"}


def test_preflight_may_be_tried_again_or_a_host_left_out() -> None:
    run = simulated(2, {("h0", "preflight do apply"): [REJECT]})
    assert "1 of 2 hosts did not pass" in decide(run.state, run.limits, 0.0).blocked["preflight"]
    assert again(run, answer(Kind.RETRY, "h0", "preflight", "host")) == 0
    run = simulated(2, {("h0", "preflight do apply"): [REJECT]})
    assert again(run, left("h0")) == 0 and summary(run.state) == {"h0": "left", "h1": "done"}


def test_a_host_held_before_the_change_needs_a_human_once_others_were_changed() -> None:
    run = simulated(2, {("h1", "backup do apply"): [HOLD]}, stop_after_failures=2)
    assert exit_code(run.state) == 5 and not run.state.hosts["h1"].out
    run = simulated(2, {(host, "backup do apply"): [HOLD] for host in ("h0", "h1")})
    assert exit_code(run.state) == 1


def test_a_host_that_failed_before_its_change_is_not_turned_and_can_be_retried() -> None:
    run = simulated(2, {("h1", "backup do apply"): [REJECT]}, stop_after_failures=2)
    assert summary(run.state) == {"h0": "done", "h1": "failed before change"} and exit_code(run.state) == 1
    assert again(run, answer(Kind.RETRY, "h1", "backup", "rsync")) == 0


def test_a_host_turned_before_its_change_has_nothing_to_take_back() -> None:
    run = simulated(2, orders=[turn("h1")])
    assert not starts_of(run, "h1") and summary(run.state)["h1"] == "failed before change"
    assert exit_code(run.state) == 1


# -- who answers and who does not -------------------------------------------------------------------------------------


def test_what_was_lost_is_probed_and_what_was_not_done_is_done() -> None:
    run = simulated(1, {("h0", "stack do apply"): [SILENT], ("h0", "stack do probe"): [Outcome(kind=Kind.NOT_DONE)]})
    kinds = [event.kind for event in run.events if event.phase == "stack"]
    assert kinds == [Kind.STARTED, Kind.LOST, Kind.PROBING, Kind.NOT_DONE, Kind.STARTED, Kind.ACCEPTED]


def test_a_drain_that_never_acted_gives_its_slot_back() -> None:
    state = Simulation(full_table(), ["h0", "h1"], Limits(), lambda _s, _h: Outcome())
    state.record([*_until_drain(state)])
    [start] = decide(state.state, Limits(), 0.0).starts
    told(state.state, start, SILENT)
    assert state.state.hosts["h0"].out
    [probe] = decide(state.state, Limits(), 0.0).starts
    assert (probe.tasks, probe.hosts) == ("probe", ("h0",))
    told(state.state, probe, Outcome(kind=Kind.NOT_DONE))
    assert not state.state.hosts["h0"].out and state.state.counts.touched == 0


def _until_drain(run: Simulation) -> list[Event]:
    events: list[Event] = []
    for phase, provider in full_table().keys[:3]:
        start = Start(tuple(run.hosts), phase, provider, "do", "apply")
        events += intents(start)
        events += [Event(Kind.ACCEPTED, host, phase, provider, "do") for host in run.hosts]
    return events


def test_an_unreachable_host_is_asked_again_when_due_and_counted() -> None:
    state = fresh(1)
    told(state, decide(state, Limits(), 0.0).starts[0], UNREACHABLE, now=100.0)
    assert decide(state, Limits(), 101.0) == decide(state, Limits(), 104.9)
    assert decide(state, Limits(), 101.0).wake_at == 105.0 and not decide(state, Limits(), 101.0).finished
    [probe] = decide(state, Limits(), 105.0).starts
    told(state, probe, UNREACHABLE, now=105.0)
    step = state.hosts["h0"].steps["preflight", "host"]
    assert (step.lost, step.lost_waited, step.unreachable, step.silent, step.attempts) == (2, 5.0, True, False, 2)
    [probe] = decide(state, Limits(), 110.0).starts
    told(state, probe, SILENT, now=110.0)
    assert state.hosts["h0"].steps["preflight", "host"].silent
    [probe] = decide(state, Limits(), 110.0).starts
    told(state, probe, now=110.0)
    assert state.hosts["h0"].steps["preflight", "host"][4:9] == (0, False, "", 0.0, False)


def test_a_host_held_because_nobody_answers_holds_its_slot_and_others_finish() -> None:
    lines = {("h0", "stack do apply"): [UNREACHABLE], ("h0", "stack do probe"): [HOLD]}
    run = simulated(3, lines, max_unavailable=2, stop_after_failures=2)
    assert summary(run.state) == {"h0": "held: stack", "h1": "done", "h2": "done"}
    assert exit_code(run.state) == 5 and run.state.hosts["h0"].out
    assert again(run, answer(Kind.RETRY, "h0", "stack", "apt")) == 0


def test_a_resume_takes_up_what_nobody_answered_and_what_failed_before_it_was_touched() -> None:
    held = Outcome(kind=Kind.HELD, data={"why": "no route", "unreachable": True})
    lines = {
        ("h0", "stack do apply"): [held],
        ("h1", "backup do apply"): [REJECT],
        ("h2", "verify do apply"): [REJECT],
        ("h2", "stack undo undo"): [held],
        ("h3", "stack do apply"): [HOLD],
        ("h4", "verify do apply"): [REJECT],
        ("h4", "stack undo undo"): [REJECT],
    }
    run = simulated(5, lines, max_unavailable=5, stop_after_failures=9)
    again = [(host, *step.key, direction) for host, step, direction in resumable(run.state)]
    assert again == [("h0", "stack", "apt", "do"), ("h2", "stack", "apt", "undo"), ("h1", "backup", "rsync", "do")]
    for host, phase, provider, direction in again:
        run.record([answer(Kind.RETRY, host, phase, provider, direction)])
    run.run()
    words = {"h0": "done", "h1": "done", "h2": "rolled back", "h3": "held: stack", "h4": "held: stack"}
    assert summary(run.state) == words


def test_no_slot_left_ends_the_change_and_says_so() -> None:
    run = simulated(3, {("h0", "stack do apply"): [HOLD]}, max_unavailable=1, stop_after_failures=3)
    decision = decide(run.state, run.limits, run.now)
    assert decision.finished and exit_code(run.state) == 5
    assert decision.blocked == {"h0": "cannot tell", "drain/haproxy": "2 hosts wait: 1 of 1 hosts are out"}


def test_many_hosts_gone_at_once_stop_all_new_forward_work() -> None:
    state = fresh(6)
    told(state, decide(state, Limits(6), 0.0).starts[0], hosts=[f"h{n}" for n in range(6)])
    record = decide(state, Limits(6), 0.0).starts[0]
    told(state, record, UNREACHABLE, hosts=["h0", "h1", "h2", "h3"])
    decision = decide(state, Limits(6), 1.0)
    assert not decision.starts and decision.wake_at == 5.0 and "own network" in decision.blocked["network"]
    [probe] = decide(state, Limits(6), 5.0).starts
    assert probe.tasks == "probe"
    for intent in intents(probe):
        state.apply(intent, 5.0)
    assert not decide(state, Limits(6), 5.0).starts  # not even while they are being asked
    for host in probe.hosts:
        state.apply(Event(Kind.ACCEPTED, host, "record", "host", "do"), 6.0)
    assert {start.phase for start in decide(state, Limits(6), 6.0).starts} == {"record", "backup"}


def test_going_back_goes_on_while_the_network_is_suspect() -> None:
    run = Simulation(
        full_table(), [f"h{n}" for n in range(5)], Limits(5, stop_after_failures=5), lambda _s, _h: Outcome()
    )
    run.record(_until_drain(run))
    for phase, provider in full_table().keys[3:6]:
        start = Start(tuple(run.hosts), phase, provider, "do", "apply")
        bad = {"h4": Kind.REJECTED} if phase == "seal" else {}
        run.record(intents(start))
        run.record([Event(bad.get(h, Kind.ACCEPTED), h, phase, provider, "do", data={"why": "bad"}) for h in run.hosts])
    for host in ("h0", "h1", "h2"):
        run.record(intents(Start((host,), "baseline", "gpu", "do", "apply")))
        run.record([Event(Kind.LOST, host, "baseline", "gpu", "do", data=UNREACHABLE.data)])
    assert decide(run.state, run.limits, 0.0).turns == (("h4", "bad"),)
    run.record([turn("h4")])
    [start] = decide(run.state, run.limits, 0.0).starts
    assert (start.hosts, start.direction) == (("h4",), "undo")


# -- canary -----------------------------------------------------------------------------------------------------------


def test_the_canary_opens_the_gate_when_its_watch_is_accepted() -> None:
    run = simulated(4, max_unavailable=3, canary=1)
    order = [(event.host, event.phase, event.kind) for event in run.events]
    assert order.index(("h1", "drain", Kind.STARTED)) > order.index(("h0", "watch", Kind.ACCEPTED))
    assert run.most_out == 3


def test_a_canary_that_fails_keeps_the_gate_shut_whatever_the_limit() -> None:
    run = simulated(4, {("h0", "watch do apply"): [REJECT]}, max_unavailable=3, canary=1, stop_after_failures=3)
    assert drained(run) == ["h0"] and exit_code(run.state) == 3
    assert decide(run.state, run.limits, run.now).blocked["drain/haproxy"].endswith("for canary h0")


def test_a_canary_as_wanted_or_left_does_not_keep_the_others() -> None:
    assert drained(simulated(3, {("h0", "preflight do apply"): [AS_WANTED]}, canary=1)) == ["h1", "h2"]
    assert drained(simulated(3, orders=[left("h0")], canary=1)) == ["h1", "h2"]


# -- an operator's orders ---------------------------------------------------------------------------------------------


def test_a_finished_change_goes_back_one_host_at_a_time() -> None:
    run = simulated(3)
    assert again(run, *(turn(host) for host in run.hosts)) == 3
    assert set(summary(run.state).values()) == {"rolled back"} and run.most_out == 1
    assert starts_of(run, "h2", direction="undo") == [
        f"{phase}/{provider} undo"
        for phase, provider in reversed(full_table().keys)
        if full_table().step(phase, provider).undoable
    ]


def test_a_rollback_that_was_ordered_and_proved_is_a_success() -> None:
    run = simulated(2)
    ordered = [Event(Kind.TURNED, host, data={"why": "ordered", "ordered": True}) for host in run.hosts]
    assert again(run, ordered[0], turn("h0"), ordered[1]) == 0
    assert set(summary(run.state).values()) == {"rolled back"}
    assert again(simulated(1, {("h0", "watch do apply"): [REJECT]}), ordered[0]) == 3  # it was back already


def test_a_host_that_belongs_to_somebody_else_is_a_lock_until_a_resume() -> None:
    refused = Outcome(kind=Kind.HELD, data={"why": "it belongs to change X", "refused": {"kind": "locked"}})
    run = simulated(2, {("h1", "record do apply"): [refused]}, max_unavailable=2)
    assert drained(run) == [] and exit_code(run.state) == 7
    [(host, step, direction)] = resumable(run.state)
    assert again(run, answer(Kind.RETRY, host, *step.key, direction)) == 0


def test_undo_goes_before_new_forward_work() -> None:
    state, limits = fresh(2), Limits(1, stop_after_failures=9)
    while not state.hosts["h0"].done:
        for start in decide(state, limits, 0.0).starts:
            told(state, start, hosts=["h0"] if state.counts.touched or start.phase == "drain" else ())
    assert [start.hosts for start in decide(state, limits, 0.0).starts if start.phase == "drain"] == [("h1",)]
    state.apply(turn("h0"))
    assert [(start.hosts, start.direction) for start in decide(state, limits, 0.0).starts] == [(("h0",), "undo")]


def test_what_was_as_wanted_has_nothing_to_take_back() -> None:
    run = simulated(1, {("h0", "preflight do apply"): [AS_WANTED]})
    assert again(run, turn("h0")) == 0 and summary(run.state) == {"h0": "as wanted"}


def test_a_host_left_as_it_stands_is_finished_and_counts_as_out_if_it_is() -> None:
    run = simulated(3, {("h0", "stack do apply"): [HOLD]}, max_unavailable=2, stop_after_failures=1)
    assert again(run, left("h0")) == 5 and summary(run.state) == {"h0": "left", "h1": "done", "h2": "done"}
    assert not run.state.hosts["h0"].ended_well and run.state.hosts["h1"].ended_well
    assert again(run, answer(Kind.MARKED, "h0", "stack", "apt")) == 0


def test_a_host_left_while_a_play_has_it_ends_when_the_play_does() -> None:
    state = fresh(1)
    start = decide(state, Limits(), 0.0).starts[0]
    for intent in intents(start):
        state.apply(intent)
    state.apply(left("h0"))
    assert not decide(state, Limits(), 0.0).finished
    state.apply(Event(Kind.ACCEPTED, "h0", "preflight", "host", "do"))
    assert decide(state, Limits(), 0.0).finished and exit_code(state) == 0


def test_a_left_host_may_still_be_ordered_back() -> None:
    run = simulated(1, {("h0", "stack do apply"): [HOLD]}, orders=())
    again(run, left("h0"))
    assert again(run, turn("h0")) == 3


def test_a_host_turned_while_a_play_has_it_goes_back_when_the_play_ends() -> None:
    run = simulated(1, {("h0", "stack do apply"): [Outcome(after=50.0)]}, orders=())
    assert again(run, turn("h0"), turn("h0")) == 3


def test_a_change_stopped_on_its_way_needs_a_resume() -> None:
    state = fresh(1)
    assert exit_code(state) == 5 and summary(state) == {"h0": "pending"}


def test_a_turned_host_that_finds_no_slot_says_so() -> None:
    run = simulated(3, {("h1", "stack do apply"): [HOLD]}, stop_after_failures=9)
    assert again(run, turn("h0")) == 5
    assert summary(run.state)["h0"] == "going back: release"
    assert "1 of 1 hosts are out" in decide(run.state, run.limits, run.now).blocked["release/haproxy"]


# -- what else the journal says ---------------------------------------------------------------------------------------


def test_notes_say_which_machine_a_host_is_and_whether_its_marker_was_given_back() -> None:
    state = fresh(1)
    state.apply(Event(Kind.NOTE, "h0", data={"machine_id": "m1"}))
    state.apply(Event(Kind.NOTE, "h0", data={"unmarked": True}))
    state.apply(Event(Kind.NOTE, "load balancer", data={"machine_id": "m2"}))
    state.apply(Event(Kind.CREATED))
    assert state.machines == {"m1": "h0"} and state.hosts["h0"].unmarked
    told(state, decide(state, Limits(), 0.0).starts[0])
    assert not state.hosts["h0"].unmarked


@pytest.mark.parametrize(
    "event",
    [
        Event(Kind.STARTED, "stranger", "stack", "apt", "do"),
        Event(Kind.STARTED, "h0", "stack", "yum", "do"),
        Event(Kind.TURNED, "stranger"),
        Event(Kind.ACCEPTED, "h0", "stack", "apt", "do"),
        Event(Kind.STARTED, "h0", "stack", "apt", "undo"),
    ],
)
def test_an_event_that_does_not_belong_is_refused_and_changes_nothing(event: Event) -> None:
    state = fresh(1)
    before = decide(state, Limits(), 0.0)
    with pytest.raises(IllegalTransition):
        state.apply(event)
    assert decide(state, Limits(), 0.0) == before


def test_a_small_table_of_ones_own_works_as_well() -> None:
    """The planner knows no phase by name: a table without a row that brings back keeps its hosts out."""
    rows = (
        Phase("look", "", Play("look", "apply"), NOTHING_TO_UNDO),
        Phase("out", "", Play("out", "apply"), Play("out", "undo"), takes_out=True),
    )
    run = Simulation(Table.build(rows, lambda _: ["x"]), ["a", "b"], Limits(2), lambda _s, _h: Outcome())
    run.run()
    assert exit_code(run.state) == 5 and run.state.counts.out == 2


def test_what_waits_is_left_alone_once_preflight_has_refused_somebody() -> None:
    lines = {
        ("h0", "record do apply"): [Outcome(kind=Kind.AGAIN, data={"after": 60.0})],
        ("h1", "preflight do apply"): [Outcome(after=10.0, kind=Kind.REJECTED)],
    }
    run = simulated(2, lines)
    assert run.now == 10.0 and exit_code(run.state) == 1 and starts_of(run, "h0", "record") == ["record/host do"]
