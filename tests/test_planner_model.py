"""The planner against a world that does not keep its promises: random outcomes, half-done work, crashes, operators.

The world knows what really happened on each host; the planner only what it was told. What must hold is said about the
world: how many hosts really do not serve, what is really left on a host that counts as rolled back.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpuchange.journal import Journal
from gpuchange.phase import Irreversible, Phase
from gpuchange.phases import PHASES
from gpuchange.planner import Limits, Start, State, StepKey, Table, decide, exit_code, summary
from gpuchange.states import Event, Kind, Status
from tests.simulate import PROVIDERS, Outcome, Simulation, full_table, intents

IN_FLIGHT = {Status.DOING, Status.LOOKING, Status.UNDOING, Status.UNDO_LOOKING}
STUCK = {Status.HELD, Status.FAILED, Status.UNDO_HELD, Status.UNDO_FAILED}
INTENTS = {Kind.STARTED, Kind.PROBING}
ONE_WAY = tuple(
    Phase(row.name, row.does, row.do, Irreversible("for good"), row.takes_out, row.brings_back, row.reverse)
    if row.name == "change"
    else row
    for row in PHASES
)

Thing = tuple[str, str, str]
"""(host, phase of the role, provider): what a role changes on a host; drain and release change the same thing."""


class Fleet(RuleBasedStateMachine):
    @initialize(
        hosts=st.integers(1, 5),
        limits=st.builds(
            Limits,
            max_unavailable=st.integers(1, 3),
            canary=st.integers(0, 2),
            stop_after_failures=st.integers(1, 4),
            on_failure=st.sampled_from(["host", "change", "hold"]),
        ),
        one_way=st.booleans(),
    )
    def begin(self, hosts: int, limits: Limits, one_way: bool) -> None:
        self.table = Table.build(ONE_WAY if one_way else PHASES, PROVIDERS.__getitem__)
        self.names = [f"h{number}" for number in range(hosts)]
        self.limits, self.now = limits, 0.0
        self.state = State(self.table, self.names)
        self.journal: list[tuple[Event, float]] = []
        self.in_flight: dict[str, Start] = {}
        self.world: dict[Thing, str] = {}  # none (missing), half, done
        self.latest: dict[tuple[str, StepKey], Kind] = {}

    # -- what happens -------------------------------------------------------------------------------------------------

    @rule(data=st.data())
    def play(self, data: st.DataObject) -> None:
        for start, host in self.decide_and_begin():
            if start.tasks != "probe" and data.draw(st.booleans(), "acted at once"):
                self.act(start, host, data.draw(st.sampled_from(["half", "all"])))

    @rule(rounds=st.integers(1, 12))
    def all_goes_well(self, rounds: int) -> None:
        for _ in range(rounds):
            self.decide_and_begin()
            self.as_many_serve_as_promised()
            self.all_end_well()

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), kind=st.sampled_from([Kind.ACCEPTED] * 6 + [Kind.REJECTED, Kind.AGAIN, Kind.HELD, Kind.LOST]))
    def end(self, data: st.DataObject, kind: Kind) -> None:
        host = data.draw(st.sampled_from(sorted(self.in_flight)), "host")
        start = self.in_flight.pop(host)
        if start.tasks == "probe":
            kind = data.draw(st.sampled_from([self.truth(start, host), Kind.LOST]))
        elif kind is Kind.ACCEPTED:
            self.act(start, host, "all")
        elif data.draw(st.booleans(), "acted before"):
            self.act(start, host, data.draw(st.sampled_from(["half", "all"])))
        more = {
            Kind.AGAIN: {"after": 10.0},
            Kind.LOST: data.draw(st.sampled_from([{"silent": True}, {"unreachable": True, "after": 7.0}])),
        }
        self.write(Event(kind, host, start.phase, start.provider, start.direction, data=more.get(kind, {})))

    @rule(seconds=st.floats(0.0, 30.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        """The controller dies; what it had in hand goes on for a while; another one takes over from the journal."""
        for host, start in self.in_flight.items():
            if start.tasks != "probe" and data.draw(st.booleans(), "acted after all"):
                self.act(start, host, data.draw(st.sampled_from(["half", "all"])))
        self.in_flight.clear()
        self.state = State(self.table, self.names)
        self.journal = [(event, self.now) for event, _ in self.journal]
        for event, now in self.journal:
            self.state.apply(event, now)
        for host, key, status in list(self.steps()):
            if status in IN_FLIGHT:
                direction = "undo" if status.startswith("undo") else "do"
                self.write(Event(Kind.LOST, host, *key, direction, data={"why": "the controller ended"}))

    @precondition(lambda self: any(status in STUCK for _, _, status in self.steps()))
    @rule(data=st.data(), kind=st.sampled_from([Kind.RETRY, Kind.MARKED]))
    def answer(self, data: st.DataObject, kind: Kind) -> None:
        stuck = [(host, key, status) for host, key, status in self.steps() if status in STUCK]
        host, key, status = data.draw(st.sampled_from(stuck))
        direction = "undo" if status.startswith("undo") else "do"
        if kind is Kind.MARKED:  # the operator has seen to it
            play = self.table.step(*key).play(direction)
            self.world[host, play.phase, key[1]] = "done" if play.tasks == "apply" else "none"
        self.write(Event(kind, host, *key, direction))

    @rule(data=st.data(), kind=st.sampled_from([Kind.TURNED, Kind.LEFT]))
    def order(self, data: st.DataObject, kind: Kind) -> None:
        if data.draw(st.integers(0, 4)) == 0:
            self.write(Event(kind, data.draw(st.sampled_from(self.names)), data={"why": "ordered"}))

    # -- the world ----------------------------------------------------------------------------------------------------

    def thing(self, start: Start, host: str) -> tuple[Thing, str]:
        play = self.table.step(start.phase, start.provider).play(start.direction)
        assert start.role == f"{play.phase}_{start.provider}" and start.aim == play.tasks
        return (host, play.phase, start.provider), "done" if play.tasks == "apply" else "none"

    def act(self, start: Start, host: str, how_far: str) -> None:
        thing, goal = self.thing(start, host)
        if self.world.get(thing, "none") != goal:
            self.world[thing] = goal if how_far == "all" else "half"

    def truth(self, start: Start, host: str) -> Kind:
        thing, goal = self.thing(start, host)
        found = self.world.get(thing, "none")
        return Kind.HELD if found == "half" else Kind.ACCEPTED if found == goal else Kind.NOT_DONE

    def serves(self, host: str) -> bool:
        return all(self.world.get((host, "drain", provider), "none") == "none" for provider in PROVIDERS["drain"])

    # -- the journal --------------------------------------------------------------------------------------------------

    def steps(self) -> Any:
        for host, standing in self.state.hosts.items():
            for key, step in standing.steps.items():
                yield host, key, step.status

    def write(self, event: Event) -> None:
        self.journal.append((event, self.now))
        self.state.apply(event, self.now)
        if event.phase:
            self.latest[event.host, (event.phase, event.provider)] = event.kind

    # -- what must hold -----------------------------------------------------------------------------------------------

    def check_intent(self, intent: Event) -> None:
        host, key = self.state.hosts[intent.host], (intent.phase, intent.provider)
        before, beyond = self.split(intent.host, key)
        latest = self.latest.get((intent.host, key))
        assert latest not in INTENTS, "begun twice without an outcome"
        assert latest not in (Kind.LOST, Kind.RETRY) or intent.kind is Kind.PROBING, "begun again without a look"
        assert not host.left and intent.host not in self.in_flight
        if intent.direction == "do" and not host.turned:
            assert all(status is Status.DONE for status in before), "a step begun before the earlier ones were done"
        if intent.direction == "undo":
            assert host.turned
            assert all(status in (Status.PENDING, Status.UNDONE) for status in beyond), "not last in, first out"
        if intent.phase == "drain" and intent.kind is Kind.STARTED and self.serves(intent.host) and not host.out:
            self.check_gate(intent.host)

    def split(self, host: str, key: StepKey) -> tuple[list[Status], list[Status]]:
        at = self.table.index[key]
        steps = self.state.hosts[host].steps
        undoable = self.table.undoable
        return (
            [steps[other].status for other in self.table.keys[:at]],
            [steps[other].status for other in self.table.keys[at + 1 :] if other in undoable],
        )

    def check_gate(self, host: str) -> None:
        others = [standing for name, standing in self.state.hosts.items() if name != host and not standing.left]
        assert all(other.steps["preflight", "host"].status is Status.DONE for other in others)
        bad = [other for other in others if other.turned or {step.status for step in other.steps.values()} & STUCK]
        assert len(bad) < self.limits.stop_after_failures
        canaries = self.names[: self.limits.canary]
        if host not in canaries:
            assert all(self.state.hosts[name].left or self.state.hosts[name].done for name in canaries)

    @invariant()
    def as_many_serve_as_promised(self) -> None:
        really_out = sum(not self.serves(host) for host in self.names)
        counted = sum(standing.out for standing in self.state.hosts.values())
        assert really_out <= counted == self.state.counts.out <= self.limits.max_unavailable

    @invariant()
    def the_journal_tells_the_same(self) -> None:
        again = State(self.table, self.names)
        for event, now in self.journal:
            again.apply(event, now)
        assert decide(again, self.limits, self.now) == decide(self.state, self.limits, self.now)
        assert (exit_code(again), summary(again)) == (exit_code(self.state), summary(self.state))

    @invariant()
    def who_is_done_or_back_really_is(self) -> None:
        for name, word in summary(self.state).items():
            if word == "rolled back":
                assert all(
                    value == "none" for (host, *_), value in self.world.items() if host == name and _[0] in CHANGED
                )
            if word == "done":
                assert self.serves(name) and self.world[name, "stack", "apt"] == "done"

    def teardown(self) -> None:
        """Left alone from here on, with hosts that do as they are told, the change comes to an end."""
        if not hasattr(self, "state"):
            return
        for _ in range(40 * len(self.names)):
            if decide(self.state, self.limits, self.now).finished:
                break
            self.decide_and_begin()
            self.as_many_serve_as_promised()
            self.all_end_well()
            self.now = max(self.now, decide(self.state, self.limits, self.now).wake_at or 0.0)
        assert decide(self.state, self.limits, self.now).finished, "it never ends"
        self.who_is_done_or_back_really_is()
        self.exit_code_fits()

    def decide_and_begin(self) -> list[tuple[Start, str]]:
        decision = decide(self.state, self.limits, self.now)
        for host, why in decision.turns:
            self.write(Event(Kind.TURNED, host, data={"why": why}))
        begun = [(start, host) for start in decision.starts for host in start.hosts]
        for start in decision.starts:
            for intent in intents(start):
                self.check_intent(intent)
                self.write(intent)
                self.in_flight[intent.host] = start
        return begun

    def all_end_well(self) -> None:
        for host, start in self.in_flight.items():
            kind = self.truth(start, host) if start.tasks == "probe" else Kind.ACCEPTED
            if kind is Kind.ACCEPTED:
                self.act(start, host, "all")
            self.write(Event(kind, host, start.phase, start.provider, start.direction))
        self.in_flight.clear()

    def exit_code_fits(self) -> None:
        words, code = set(summary(self.state).values()), exit_code(self.state)
        out = any(standing.out for standing in self.state.hosts.values())
        assert (code == 0) == (words <= {"done", "left"} and not out)
        assert (code == 6) == any(status is Status.UNDO_FAILED for _, _, status in self.steps())
        assert code in (5, 6) or not out
        assert code != 3 or "rolled back" in words
        assert code not in (1, 4) or "rolled back" not in words


CHANGED = ("drain", "change", "stack", "seal")

TestFleet = pytest.mark.thorough(Fleet.TestCase)
TestFleet.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


TROUBLE = {
    ("h1", "verify"): [Kind.REJECTED],
    ("h2", "stack"): [Kind.LOST],
    ("h3", "drain"): [Kind.AGAIN, Kind.HELD],
    ("h4", "watch"): [Kind.REJECTED],
}


def test_every_prefix_of_a_journal_folds_to_the_decision_that_was_taken_there(tmp_path: Any) -> None:
    said = {key: list(kinds) for key, kinds in TROUBLE.items()}

    def behave(start: Start, host: str) -> Outcome:
        kinds = said.get((host, start.phase)) if start.direction == "do" else None
        return Outcome(kind=kinds.pop(0), data={"after": 5.0, "why": "trouble"}) if kinds else Outcome()

    limits = Limits(2, canary=1, stop_after_failures=9)
    with Journal.create(tmp_path / "change", {}) as journal:
        run = Simulation(full_table(), [f"h{n}" for n in range(6)], limits, behave, journal=journal)
        run.run()
        events = list(journal.events())
    assert len(events) > 150 and exit_code(run.state) == 5
    live = State(full_table(), run.hosts)
    for length, event in enumerate(events):
        reloaded = State(full_table(), run.hosts)
        for earlier in events[:length]:
            reloaded.apply(earlier)
        assert decide(reloaded, limits, 9.0) == decide(live, limits, 9.0), f"after {length} events"
        live.apply(event)


@pytest.mark.parametrize("seed", range(3))
def test_shuffled_outcomes_of_one_moment_come_to_the_same_end(seed: int) -> None:
    import random

    dice = random.Random(seed)
    run = Simulation(
        full_table(), [f"h{n}" for n in range(9)], Limits(4), lambda _s, _h: Outcome(dice.choice([1, 1, 2]))
    )
    run.run()
    assert exit_code(run.state) == 0 and run.most_out <= 4
