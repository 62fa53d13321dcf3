"""What the tests of the planner share: outcomes that go wrong, an operator's orders, what was started."""

from __future__ import annotations

from collections.abc import Sequence

from gpuchange.planner import Start, State, exit_code
from gpuchange.states import Event, Kind
from tests.simulate import Outcome, Simulation, full_table, intents

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


def upto(state: State, host: str, phase: str, outcome: Outcome | None = None) -> None:
    """Take one host to the first step of `phase`, and through that with `outcome` when one is given."""
    for key in state.table.keys:
        last = key[0] == phase
        if last and outcome is None:
            return
        told(state, Start((host,), *key, "do", "apply"), outcome if last else None)
        if last:
            return
