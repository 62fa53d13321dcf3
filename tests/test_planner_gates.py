"""What the planner says for people, and its limits to the very number: words, gates, wake-ups, defaults."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, astuple

import pytest

from gpuchange.planner import Decision, Limits, Start, State, decide
from gpuchange.states import Event, Kind
from tests.planning import HOLD, REJECT, UNREACHABLE, answer, fresh, left, told, turn, upto
from tests.simulate import Outcome, intents, simulated

# -- defaults ---------------------------------------------------------------------------------------------------------


def test_limits_are_careful_unless_told_otherwise() -> None:
    assert astuple(Limits()) == (1, 0, 1, "host")


def test_a_decision_is_to_do_nothing_unless_it_says_so() -> None:
    assert astuple(Decision()) == ((), (), None, False, {})
    start = Start(("h0",), "stack", "apt", "do", "apply")
    assert (start.role, start.aim) == ("", "apply")


@pytest.mark.parametrize("value", [Limits(), Decision(), Start(("h0",), "stack", "apt", "do", "apply")])
def test_what_was_decided_cannot_be_changed_afterwards(value: object) -> None:
    with pytest.raises(FrozenInstanceError):
        value.blocked = {}  # type: ignore[attr-defined]


# -- stuck hosts are named with the reason ----------------------------------------------------------------------------


def test_who_is_stuck_is_named_with_its_reason_also_while_stopping() -> None:
    state = fresh(3)
    upto(state, "h0", "record", HOLD)
    upto(state, "h1", "record", Outcome(kind=Kind.REJECTED, data={"why": "no room"}))
    expected = {"h0": "cannot tell", "h1": "no room"}
    assert decide(state, Limits(on_failure="hold"), 0.0).blocked.items() >= expected.items()
    stopped = decide(state, Limits(on_failure="hold"), 0.0, stopping=True)
    assert stopped.blocked == expected | {"change": "stopping: nothing new is started"}
    assert stopped.finished


def test_turning_is_decided_at_once_and_decided_again() -> None:
    state = fresh(2)
    for host in ("h0", "h1"):
        upto(state, host, "seal")
    told(state, Start(("h0",), "seal", "host", "do", "apply"), Outcome(kind=Kind.REJECTED))
    decision = decide(state, Limits(2), 7.0)
    assert decision.turns == (("h0", "a step failed"),)
    assert (decision.wake_at, decision.finished) == (7.0, False)
    assert {host for start in decision.starts for host in start.hosts} == {"h1"}


def test_a_change_that_goes_back_as_a_whole_says_why_to_each_host() -> None:
    state = fresh(3)
    for host in ("h0", "h1"):
        upto(state, host, "seal")
    told(state, Start(("h0",), "seal", "host", "do", "apply"), Outcome(kind=Kind.REJECTED))
    why = "another host failed and the plan says: roll back the whole change"
    decision = decide(state, Limits(3, on_failure="change"), 0.0)
    assert decision.turns == (("h0", "a step failed"), ("h1", why))
    for host, reason in decision.turns:
        state.apply(Event(Kind.TURNED, host, data={"why": reason}))
    upto(state, "h2", "preflight", Outcome())
    blocked = decide(state, Limits(3, on_failure="change"), 0.0).blocked
    assert not any(said for said in blocked.values() if "TURN" in said)


def test_nobody_is_turned_when_nobody_failed() -> None:
    state = fresh(2)
    for host in ("h0", "h1"):
        upto(state, host, "seal")
    for policy in ("host", "change", "hold"):
        assert decide(state, Limits(2, on_failure=policy), 0.0).turns == ()


def test_a_whole_change_that_began_to_go_back_goes_on_doing_so_after_a_crash_between_its_turns() -> None:
    state = fresh(2)
    for host in ("h0", "h1"):
        upto(state, host, "seal")
    state.apply(Event(Kind.TURNED, "h0", data={"why": "a step failed"}))
    why = "another host failed and the plan says: roll back the whole change"
    assert decide(state, Limits(2, on_failure="change"), 0.0).turns == (("h1", why),)
    assert decide(state, Limits(2, on_failure="host"), 0.0).turns == ()


def test_going_back_is_not_kept_by_the_phase_at_which_going_forward_ends() -> None:
    state = fresh(2)
    for host in ("h0", "h1"):
        upto(state, host, "seal")
    state.apply(turn("h0"))
    [start] = decide(state, Limits(2), 0.0, last_phase="preflight").starts
    assert (start.hosts, start.direction) == (("h0",), "undo")
    told(state, start, Outcome(kind=Kind.AGAIN, data={"after": 5.0}))
    waiting = decide(state, Limits(2), 0.0, last_phase="preflight")
    assert (waiting.wake_at, waiting.finished) == (5.0, False)


def test_a_host_that_preflight_refuses_late_does_not_stop_those_that_are_under_way() -> None:
    state = fresh(2)
    told(state, Start(("h0", "h1"), "preflight", "host", "do", "apply"), HOLD, hosts=["h1"])
    state.apply(left("h1"))
    upto(state, "h0", "seal")
    state.apply(answer(Kind.RETRY, "h1", "preflight", "host"))
    told(state, Start(("h1",), "preflight", "host", "do", "probe"), REJECT)
    decision = decide(state, Limits(2), 0.0)
    assert [(start.hosts, start.phase) for start in decision.starts] == [(("h0",), "seal")]
    assert "preflight" not in decision.blocked


# -- gates in words ---------------------------------------------------------------------------------------------------


def at_gate(hosts: int) -> State:
    state = fresh(hosts)
    for number in range(hosts):
        upto(state, f"h{number}", "drain")
    return state


def test_hosts_at_the_gate_are_counted_and_told_of_the_slots() -> None:
    state = at_gate(4)
    [start] = decide(state, Limits(1), 0.0).starts
    assert start.hosts == ("h0",)
    told(state, start)
    assert decide(state, Limits(1), 0.0).blocked == {"drain/haproxy": "3 hosts wait: 1 of 1 hosts are out"}


def test_the_gate_closes_with_the_failures_to_the_number() -> None:
    state = at_gate(4)
    told(state, Start(("h0",), "drain", "haproxy", "do", "apply"), HOLD)
    assert [start.hosts for start in decide(state, Limits(2, stop_after_failures=2), 0.0).starts] == [("h1",)]
    closed = decide(state, Limits(2, stop_after_failures=1), 0.0)
    assert closed.starts == ()
    said = "3 hosts wait: stopped after 1 failed hosts (stop_after_failures: 1)"
    assert closed.blocked["drain/haproxy"] == said and closed.finished


def test_a_limit_that_was_lowered_on_the_way_lets_nobody_else_out() -> None:
    state = at_gate(6)
    for start in decide(state, Limits(3), 0.0).starts:
        told(state, start)
    assert state.counts.out == 3
    for limit in (1, 2, 3):
        decision = decide(state, Limits(limit), 0.0)
        assert not [start for start in decision.starts if start.provider == "haproxy"]
        assert decision.blocked == {"drain/haproxy": f"3 hosts wait: 3 of {limit} hosts are out"}


def test_a_canary_on_its_way_back_does_not_keep_others_from_going_back() -> None:
    run = simulated(3, max_unavailable=2, canary=1)
    for host in ("h0", "h1"):
        run.record([turn(host)])
    undone = [start for start in decide(run.state, run.limits, run.now).starts if start.direction == "undo"]
    assert sorted(host for start in undone for host in start.hosts) == ["h0", "h1"]


def test_one_failure_closes_the_gate_of_a_change_that_goes_back_as_a_whole() -> None:
    state = at_gate(3)
    told(state, Start(("h0",), "drain", "haproxy", "do", "apply"), HOLD)
    decision = decide(state, Limits(3, stop_after_failures=9, on_failure="change"), 0.0)
    assert decision.starts == ()
    assert decision.blocked["drain/haproxy"] == (
        "2 hosts wait: a host failed and the plan says: roll back the whole change"
    )


def test_who_waits_for_the_canary_is_told_its_name() -> None:
    state = at_gate(4)
    first = decide(state, Limits(4, canary=2), 0.0)
    assert [start.hosts for start in first.starts] == [("h0", "h1")]
    told(state, first.starts[0])
    second = decide(state, Limits(4, canary=2), 0.0)
    assert second.blocked == {"drain/haproxy": "2 hosts wait: for canary h0"}
    assert {start.phase for start in second.starts} == {"drain"} and {start.provider for start in second.starts} == {
        "gpu_users"
    }


def test_a_host_that_preflight_refused_ends_it_for_all_in_words() -> None:
    state = fresh(3)
    told(state, decide(state, Limits(), 0.0).starts[0], REJECT, hosts=["h1"])
    told(state, Start(("h0", "h2"), "preflight", "host", "do", "apply"))
    decision = decide(state, Limits(), 0.0)
    assert (decision.starts, decision.finished) == ((), True)
    assert decision.blocked == {"h1": "bad", "preflight": "1 of 3 hosts did not pass: nothing is changed"}


def test_a_refusal_at_the_barrier_stops_nobody_once_others_are_touched() -> None:
    state = fresh(2)
    for host in ("h0", "h1"):
        upto(state, host, "seal")
    state.apply(Event(Kind.TURNED, "h1", data={"why": "x"}))
    assert "preflight" not in decide(state, Limits(2), 0.0).blocked


# -- the network ------------------------------------------------------------------------------------------------------


def silent_hosts(silent: int, talking: int) -> State:
    state = fresh(silent + talking)
    [start] = decide(state, Limits(), 0.0).starts
    told(state, start, UNREACHABLE, hosts=[f"h{number}" for number in range(silent)])
    for number in range(silent, silent + talking):
        for intent in intents(Start((f"h{number}",), "preflight", "host", "do", "apply")):
            state.apply(intent)
    return state


@pytest.mark.parametrize(
    ("silent", "talking", "suspect"), [(2, 0, False), (3, 0, True), (3, 2, True), (3, 3, False), (4, 3, True)]
)
def test_the_network_is_suspect_from_three_silent_hosts_and_more_than_half(
    silent: int, talking: int, suspect: bool
) -> None:
    blocked = decide(silent_hosts(silent, talking), Limits(), 0.0).blocked
    said = {"network": "many hosts stopped answering at once: is it our own network?"} if suspect else {}
    assert {key: value for key, value in blocked.items() if key == "network"} == said


def test_a_suspect_network_starts_nothing_fresh_but_looks_again_when_due() -> None:
    state = silent_hosts(3, 0)
    told(state, Start(("h0", "h1", "h2"), "preflight", "host", "do", "probe"), UNREACHABLE, now=5.0)
    decision = decide(state, Limits(), 10.0)
    assert [(start.tasks, start.hosts) for start in decision.starts] == [("probe", ("h0", "h1", "h2"))]


def test_a_suspect_network_keeps_hosts_at_the_gate() -> None:
    state = at_gate(5)
    for number in range(3):
        told(state, Start((f"h{number}",), "drain", "haproxy", "do", "apply"), UNREACHABLE)
    decision = decide(state, Limits(5), 0.0)
    assert decision.starts == () and decision.wake_at == 5.0
    assert decision.blocked["drain/haproxy"].startswith("2 hosts wait: many hosts stopped answering at once")


# -- when to look again -----------------------------------------------------------------------------------------------


def test_the_earliest_wait_decides_when_to_wake_and_due_means_now() -> None:
    state = fresh(3)
    [start] = decide(state, Limits(), 0.0).starts
    for host, after in (("h0", 30.0), ("h1", 10.0), ("h2", 20.0)):
        told(state, start, Outcome(kind=Kind.AGAIN, data={"after": after}), hosts=[host])
    assert decide(state, Limits(), 0.0).wake_at == 10.0
    assert decide(state, Limits(), 9.9).starts == ()
    due = decide(state, Limits(), 10.0)
    assert [start.hosts for start in due.starts] == [("h1",)] and due.wake_at == 20.0
    assert [start.hosts for start in decide(state, Limits(), 20.0).starts] == [("h1", "h2")]
    assert decide(state, Limits(), 30.0).wake_at is None and not decide(state, Limits(), 30.0).finished


def test_a_wait_in_a_later_phase_does_not_wake_who_stops_before_it() -> None:
    state = fresh(1)
    upto(state, "h0", "record", Outcome(kind=Kind.AGAIN, data={"after": 10.0}))
    assert decide(state, Limits(), 0.0).wake_at == 10.0
    before = decide(state, Limits(), 0.0, last_phase="preflight")
    assert (before.wake_at, before.finished, before.starts) == (None, True, ())
    assert decide(state, Limits(), 10.0, last_phase="preflight").starts == ()
    assert decide(state, Limits(), 10.0, last_phase="record").starts != ()


# -- order of starts --------------------------------------------------------------------------------------------------


def test_undo_comes_first_then_what_is_nearest_to_the_end() -> None:
    state = fresh(4)
    for host, phase in (("h0", "seal"), ("h1", "verify"), ("h2", "stack"), ("h3", "seal")):
        upto(state, host, phase)
    state.apply(Event(Kind.TURNED, "h3", data={"why": "x"}))
    starts = decide(state, Limits(9), 0.0).starts
    assert [(start.direction, start.phase) for start in starts] == [
        ("undo", "drain"),
        ("do", "verify"),
        ("do", "stack"),
        ("do", "seal"),
    ]


def test_going_back_out_takes_slots_before_going_out() -> None:
    run = simulated(3, max_unavailable=2)
    for host in ("h1", "h2", "h0"):
        run.record([turn(host)])
    first = decide(run.state, run.limits, run.now)
    assert [start.hosts for start in first.starts if start.phase == "release"] == [("h0", "h1")]
    assert "release/haproxy" in first.blocked or "h2" not in {host for start in first.starts for host in start.hosts}


# -- going back and going forth share the slots -----------------------------------------------------------------------


def test_a_host_that_goes_back_takes_one_slot_and_leaves_the_others() -> None:
    state = fresh(5)
    upto(state, "h0", "watch", Outcome())
    for host in ("h1", "h2", "h3", "h4"):
        upto(state, host, "drain")
    state.apply(turn("h0"), 0.0)
    starts = decide(state, Limits(3, stop_after_failures=9), 0.0).starts
    assert [(start.direction, start.hosts) for start in starts] == [("undo", ("h0",)), ("do", ("h1", "h2"))]


def test_who_waits_to_go_back_waits_for_a_slot_whatever_stops_the_others() -> None:
    state = fresh(2)
    for host in ("h0", "h1"):
        upto(state, host, "watch", Outcome())
        state.apply(turn(host), 0.0)
    start = next(start for start in decide(state, Limits(1), 0.0).starts if start.hosts == ("h0",))
    told(state, start)
    blocked = decide(state, Limits(1), 0.0).blocked
    assert "1 hosts wait: 1 of 1 hosts are out" in blocked.values()
