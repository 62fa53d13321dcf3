"""The planner: who may go on, who waits, who goes back, and what it all comes to."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gpuchange.errors import IllegalTransition
from gpuchange.phase import NOTHING_TO_UNDO, Irreversible, Phase, Play
from gpuchange.phases import PHASES
from gpuchange.planner import Limits, Start, State, Table, decide, exit_code, resumable, summary
from gpuchange.states import Event, Kind, Status
from tests.simulate import PROVIDERS, Outcome, Simulation, full_table, intents, simulated

REJECT = Outcome(kind=Kind.REJECTED, data={"why": "bad"})
HOLD = Outcome(kind=Kind.HELD, data={"why": "cannot tell"})
UNREACHABLE = Outcome(kind=Kind.LOST, data={"why": "no route", "unreachable": True, "after": 5.0, "waited": 5.0})
GONE = Outcome(kind=Kind.REJECTED, data={"why": "no route", "unreachable": True})
SILENT = Outcome(kind=Kind.LOST, data={"why": "no word", "silent": True})
AS_WANTED = Outcome(data={"as_wanted": True})


def turn(host: str) -> Event:
    return Event(Kind.TURNED, host, data={"why": "ordered"})


def left(host: str) -> Event:
    return Event(Kind.LEFT, host)


def answer(kind: Kind, host: str, phase: str, provider: str, direction: str = "do") -> Event:
    return Event(kind, host, phase, provider, direction)


def again(run: Simulation, *orders: Event) -> int:
    """Give orders to a change that has ended, and carry it on."""
    run.record(orders)
    run.run()
    return exit_code(run.state)


def starts_of(run: Simulation, host: str, phase: str = "", direction: str = "") -> list[str]:
    return [
        f"{event.phase}/{event.provider} {event.direction}"
        for event in run.events
        if event.host == host
        and event.kind is Kind.STARTED
        and phase in ("", event.phase)
        and direction in ("", event.direction)
    ]


def drained(run: Simulation) -> list[str]:
    return list(dict.fromkeys(e.host for e in run.events if e.phase == "drain" and e.kind is Kind.STARTED))


def fresh(hosts: int = 3) -> State:
    return State(full_table(), [f"h{number}" for number in range(hosts)])


def told(
    state: State, start: Start, outcome: Outcome | None = None, hosts: Sequence[str] = (), now: float = 0.0
) -> None:
    """Let a start happen and end alike for its hosts (or those named)."""
    outcome = outcome or Outcome()
    for intent in intents(start):
        if not hosts or intent.host in hosts:
            state.apply(intent, now)
            state.apply(
                Event(outcome.kind, intent.host, start.phase, start.provider, start.direction, data=outcome.data), now
            )


# -- the table --------------------------------------------------------------------------------------------------------


def test_release_mirrors_the_providers_of_drain() -> None:
    keys = [key for key in full_table().keys if key[0] in ("drain", "release")]
    assert keys == [("drain", "haproxy"), ("drain", "gpu_users"), ("release", "gpu_users"), ("release", "haproxy")]


def test_a_plan_that_takes_no_host_out_is_refused() -> None:
    with pytest.raises(ValueError, match="out of service"):
        Table.build(PHASES, lambda phase: () if phase == "drain" else PROVIDERS[phase])


def test_a_step_knows_its_plays() -> None:
    table = full_table()
    assert table.step("release", "haproxy").play("do") == Play("drain", "undo")
    assert table.step("release", "haproxy").play("undo") == Play("drain", "apply")
    with pytest.raises(ValueError, match="no undo"):
        table.step("record", "host").play("undo")


def test_starts_name_role_and_what_a_probe_asks_about() -> None:
    run = simulated(1, {("h0", "release do undo"): [SILENT, SILENT]})
    assert exit_code(run.state) == 0
    group = full_table().groups[full_table().index["release", "haproxy"]]
    assert group["do", False].role == group["undo", True].role == "drain_haproxy"
    assert (group["do", True].tasks, group["do", True].aim, group["undo", True].aim) == ("probe", "undo", "apply")


# -- forward ----------------------------------------------------------------------------------------------------------


def test_a_change_without_trouble_takes_every_host_through_every_step_in_order() -> None:
    run = simulated(5, max_unavailable=2)
    expected = [f"{phase}/{provider} do" for phase, provider in full_table().keys]
    assert all(starts_of(run, host) == expected for host in run.hosts)
    assert (exit_code(run.state), run.most_out) == (0, 2)
    assert set(summary(run.state).values()) == {"done"} and run.state.finished


def test_hosts_at_the_same_step_share_one_play() -> None:
    state = fresh(4)
    [start] = decide(state, Limits(4), 0.0).starts
    assert (start.hosts, start.phase, start.tasks, start.role) == (
        ("h0", "h1", "h2", "h3"),
        "preflight",
        "apply",
        "preflight_host",
    )


def test_a_slow_host_holds_back_nobody() -> None:
    run = simulated(4, {("h0", "stack do apply"): [Outcome(after=1000.0)]}, max_unavailable=2)
    ended = [event.host for event in run.events if event.phase == "watch" and event.kind is Kind.ACCEPTED]
    assert ended == ["h1", "h2", "h3", "h0"]


def test_as_many_are_out_as_allowed_and_never_more() -> None:
    assert [simulated(7, max_unavailable=limit).most_out for limit in (1, 2, 3, 7, 50)] == [1, 2, 3, 7, 7]


def test_hosts_at_the_gate_are_told_what_they_wait_for() -> None:
    state = fresh(3)
    while starts := decide(state, Limits(), 0.0).starts:
        for start in starts:
            told(state, start, hosts=("h0", "h1"))
        if {start.phase for start in starts} == {"preflight", "backup"}:
            break
    assert decide(state, Limits(), 0.0).blocked == {"drain/haproxy": "2 hosts wait: 1 hosts have not passed preflight"}


def test_nobody_is_drained_before_everybody_has_passed_preflight() -> None:
    run = simulated(3, {("h2", "preflight do apply"): [Outcome(after=100.0)]})
    kinds = [(event.phase, event.kind) for event in run.events]
    assert kinds.index(("drain", Kind.STARTED)) > max(i for i, (phase, _) in enumerate(kinds) if phase == "preflight")


def test_wait_is_slept_through_and_ends_when_due() -> None:
    wait = Outcome(kind=Kind.AGAIN, data={"after": 60.0, "waited": 60.0})
    run = simulated(1, {("h0", "drain do apply"): [wait, wait]})
    assert starts_of(run, "h0", "drain") == ["drain/haproxy do"] * 3 + ["drain/gpu_users do"]
    assert run.now == pytest.approx(len(full_table().keys) + 2 + 120)


def test_waits_add_up_when_the_event_does_not_say_so() -> None:
    state = fresh(1)
    start = decide(state, Limits(), 0.0).starts[0]
    for now in (0.0, 10.0):
        told(state, start, Outcome(kind=Kind.AGAIN, data={"after": 10.0}), now=now)
    step = state.hosts["h0"].steps["preflight", "host"]
    assert (step.waited, step.due, step.attempts) == (20.0, 20.0, 2)
    assert decide(state, Limits(), 15.0).wake_at == 20.0 and not decide(state, Limits(), 15.0).starts


def test_last_phase_ends_the_way_there() -> None:
    state = fresh(2)
    while decision := decide(state, Limits(2), 0.0, last_phase="preflight").starts:
        [start] = decision
        told(state, start)
    assert start.phase == "preflight" and decide(state, Limits(2), 0.0, last_phase="preflight").finished
    while decision := decide(state, Limits(2), 0.0, last_phase="drain").starts:
        for start in decision:
            told(state, start)
    assert summary(state) == {"h0": "out: seal", "h1": "out: seal"}


def test_stopping_starts_nothing_and_ends_when_nothing_is_in_flight() -> None:
    state = fresh(2)
    start = decide(state, Limits(2), 0.0).starts[0]
    for intent in intents(start):
        state.apply(intent)
    stopped = decide(state, Limits(2), 0.0, stopping=True)
    assert (stopped.starts, stopped.finished) == ((), False) and "stopping" in stopped.blocked["change"]
    for host in start.hosts:
        state.apply(Event(Kind.ACCEPTED, host, "preflight", "host", "do"))
    assert decide(state, Limits(2), 0.0, stopping=True).finished


# -- what is as wanted ------------------------------------------------------------------------------------------------


def test_hosts_as_wanted_are_done_without_drain() -> None:
    run = simulated(3, {(host, "preflight do apply"): [AS_WANTED] for host in ("h0", "h2")})
    assert drained(run) == ["h1"] and exit_code(run.state) == 0
    assert summary(run.state) == {"h0": "as wanted", "h1": "done", "h2": "as wanted"}


@pytest.mark.parametrize(("said", "as_wanted"), [((True, None), True), ((True, False), False), ((None, None), False)])
def test_one_report_that_wants_the_change_decides(said: Sequence[bool | None], as_wanted: bool) -> None:
    table = Table.build(PHASES, lambda phase: ("a", "b") if phase == "preflight" else PROVIDERS[phase])
    run = Simulation(table, ["h0"], Limits(), lambda _start, _host: Outcome())
    for provider, word in zip("ab", said, strict=True):
        run.record(intents(Start(("h0",), "preflight", provider, "do", "apply")))
        data = {} if word is None else {"as_wanted": word}
        run.record([Event(Kind.ACCEPTED, "h0", "preflight", provider, "do", data=data)])
    run.run()
    assert run.state.hosts["h0"].as_wanted is as_wanted and bool(drained(run)) is not as_wanted


# -- failures ---------------------------------------------------------------------------------------------------------


def test_a_failed_host_goes_back_in_reverse_and_no_further_host_starts() -> None:
    run = simulated(3, {("h0", "verify do apply"): [REJECT]})
    assert starts_of(run, "h0", direction="undo") == [
        f"{step} undo" for step in ("stack/apt", "change/none", "seal/host", "drain/gpu_users", "drain/haproxy")
    ]
    assert drained(run) == ["h0"] and exit_code(run.state) == 3
    assert summary(run.state) == {"h0": "rolled back", "h1": "in service", "h2": "in service"}


def test_a_failed_phase_is_undone_too() -> None:
    run = simulated(1, {("h0", "stack do apply"): [REJECT]})
    assert starts_of(run, "h0", direction="undo")[0] == "stack/apt undo"


def test_a_host_that_failed_after_its_release_is_drained_again_within_the_limit() -> None:
    run = simulated(2, {("h0", "watch do apply"): [REJECT]}, stop_after_failures=2)
    assert starts_of(run, "h0", direction="undo")[:2] == ["release/haproxy undo", "release/gpu_users undo"]
    assert run.most_out == 1 and exit_code(run.state) == 3
    assert summary(run.state) == {"h0": "rolled back", "h1": "done"}


def test_others_go_on_while_the_limit_of_failures_is_not_reached() -> None:
    run = simulated(4, {(host, "stack do apply"): [REJECT] for host in ("h0", "h2")}, stop_after_failures=2)
    assert drained(run) == ["h0", "h1", "h2"] and exit_code(run.state) == 3


def test_a_whole_change_goes_back_when_the_plan_says_so() -> None:
    run = simulated(
        4, {("h2", "stack do apply"): [REJECT]}, on_failure="change", stop_after_failures=4, max_unavailable=1
    )
    words = summary(run.state)
    assert words == {"h0": "rolled back", "h1": "rolled back", "h2": "rolled back", "h3": "in service"}
    assert run.most_out == 1 and exit_code(run.state) == 3
    turned = {event.host: event.data["why"] for event in run.events if event.kind is Kind.TURNED}
    assert turned["h2"] == "bad" and "another host failed" in turned["h0"]


def test_a_failure_before_any_change_of_its_host_turns_the_others_too_when_the_plan_says_so() -> None:
    run = simulated(
        2,
        {("h1", "backup do apply"): [Outcome(after=60.0, kind=Kind.REJECTED)]},
        on_failure="change",
        max_unavailable=2,
    )
    assert summary(run.state) == {"h0": "rolled back", "h1": "failed before change"}
    assert exit_code(run.state) == 3


def test_a_held_host_is_not_turned_by_the_failure_of_another() -> None:
    lines = {("h0", "verify do apply"): [HOLD], ("h1", "verify do apply"): [REJECT]}
    run = simulated(2, lines, on_failure="change", max_unavailable=2, stop_after_failures=2)
    assert summary(run.state) == {"h0": "held: verify", "h1": "rolled back"} and exit_code(run.state) == 5
    assert again(run, turn("h0")) == 3


def test_what_is_held_after_the_turn_waits_for_a_human() -> None:
    lines = {("h0", "stack do apply"): [REJECT], ("h1", "stack do apply"): [Outcome(9.0, Kind.HELD)]}
    run = simulated(2, lines, on_failure="change", max_unavailable=2, stop_after_failures=2)
    assert summary(run.state) == {"h0": "rolled back", "h1": "held: stack"} and exit_code(run.state) == 5
    assert again(run, turn("h1")) == 3 and starts_of(run, "h1", direction="undo")[0] == "stack/apt undo"


def test_hold_leaves_a_failed_host_where_it_is() -> None:
    run = simulated(2, {("h0", "stack do apply"): [REJECT]}, on_failure="hold")
    assert exit_code(run.state) == 5 and summary(run.state)["h0"] == "failed: stack"
    assert decide(run.state, run.limits, run.now).blocked["h0"] == "bad"
    assert again(run, answer(Kind.RETRY, "h0", "stack", "apt")) == 0


def test_an_undo_that_fails_is_the_worst_that_can_happen() -> None:
    run = simulated(2, {("h0", "verify do apply"): [REJECT], ("h0", "stack undo undo"): [REJECT]})
    assert exit_code(run.state) == 6 and summary(run.state)["h0"] == "held: stack"
    assert again(run, answer(Kind.RETRY, "h0", "stack", "apt", "undo")) == 3


def test_a_rollback_that_is_not_proved_stays_drained() -> None:
    run = simulated(2, {("h0", "verify do apply"): [REJECT], ("h0", "seal undo undo"): [HOLD]})
    assert exit_code(run.state) == 5 and run.state.hosts["h0"].out
    assert again(run, answer(Kind.MARKED, "h0", "seal", "host", "undo")) == 3 and not run.state.hosts["h0"].out


def test_an_undo_may_take_its_time() -> None:
    wait = Outcome(kind=Kind.AGAIN, data={"after": 30.0, "waited": 30.0})
    run = simulated(1, {("h0", "verify do apply"): [REJECT], ("h0", "stack undo undo"): [wait, SILENT]})
    assert exit_code(run.state) == 3 and starts_of(run, "h0", "stack", "undo") == ["stack/apt undo"] * 2


ONE_WAY = tuple(
    Phase(
        row.name, row.does, row.do, Irreversible("the old disk is wiped"), row.takes_out, row.brings_back, row.reverse
    )
    if row.name == "change"
    else row
    for row in PHASES
)


def test_what_cannot_be_taken_back_holds_the_host_at_it() -> None:
    table = Table.build(ONE_WAY, PROVIDERS.__getitem__)
    run = Simulation(table, ["h0", "h1"], Limits(), lambda s, _h: REJECT if s.phase == "verify" else Outcome())
    run.run()
    assert exit_code(run.state) == 5 and summary(run.state)["h0"] == "held: change"
    assert decide(run.state, run.limits, 0.0).blocked["h0"] == "the old disk is wiped"


@pytest.mark.parametrize(("probed", "word"), [(Kind.NOT_DONE, "rolled back"), (Kind.ACCEPTED, "held: change")])
def test_what_cannot_be_taken_back_is_probed_when_nobody_knows_whether_it_was_done(probed: Kind, word: str) -> None:
    table = Table.build(ONE_WAY, PROVIDERS.__getitem__)
    said = {"apply": SILENT, "probe": Outcome(kind=probed)}
    run = Simulation(table, ["h0"], Limits(), lambda s, _h: said[s.tasks] if s.phase == "change" else Outcome())
    while run.state.hosts["h0"].steps["change", "none"].status is not Status.DOING:
        for start in decide(run.state, run.limits, 0.0).starts:
            told_or_begun(run, start)
    run.record([turn("h0"), Event(Kind.LOST, "h0", "change", "none", "do", data={"why": "the controller ended"})])
    run.run()
    assert summary(run.state)["h0"] == word


def told_or_begun(run: Simulation, start: Start) -> None:
    run.record(intents(start))
    if start.phase != "change":
        run.record([Event(Kind.ACCEPTED, host, start.phase, start.provider, start.direction) for host in start.hosts])


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
