"""The planner: who may go on, who waits, who goes back, and what it all comes to."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gpuchange.phase import Irreversible, Phase, Play
from gpuchange.phases import PHASES
from gpuchange.planner import Limits, Start, Table, decide, exit_code, summary
from gpuchange.states import Event, Kind, Status
from tests.planning import (
    AS_WANTED,
    HOLD,
    REJECT,
    SILENT,
    again,
    answer,
    drained,
    fresh,
    starts_of,
    told,
    turn,
)
from tests.simulate import PROVIDERS, Outcome, Simulation, full_table, intents, simulated

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
