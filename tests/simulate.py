"""A simulated change: the real planner and journal, hosts that are only a function, and a clock that jumps.

Shared by the model test and the benchmarks. It keeps the engine's order of things: intents (durable) → play → outcomes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gpuchange.journal import Journal
from gpuchange.phases import PHASES
from gpuchange.planner import Decision, Limits, Start, State, Table, decide
from gpuchange.states import Event, Kind

PROVIDERS: dict[str, Sequence[str]] = {
    "preflight": ("host",),
    "record": ("host",),
    "backup": ("rsync",),
    "drain": ("haproxy", "gpu_users"),
    "seal": ("host",),
    "baseline": ("gpu",),
    "change": ("none",),
    "stack": ("apt",),
    "verify": ("host",),
    "watch": ("host",),
}


def full_table() -> Table:
    """The product's own phases, each with the providers of an ordinary plan."""
    return Table.build(PHASES, PROVIDERS.__getitem__)


@dataclass(frozen=True)
class Outcome:
    """What a host says, `after` seconds of its own work."""

    after: float = 1.0
    kind: Kind = Kind.ACCEPTED
    data: dict[str, Any] = field(default_factory=dict)


Behaviour = Callable[[Start, str], Outcome]


def intents(start: Start, attempt: str = "") -> list[Event]:
    kind = Kind.PROBING if start.tasks == "probe" else Kind.STARTED
    return [Event(kind, host, start.phase, start.provider, start.direction, attempt) for host in start.hosts]


@dataclass
class Simulation:
    """Runs until the planner says that the change is finished. `events` is what a journal would hold."""

    table: Table
    hosts: Sequence[str]
    limits: Limits
    behave: Behaviour
    play_cost: float = 0.0  # seconds that a play takes to begin, for each of its hosts
    journal: Journal | None = None
    keep: bool = True
    now: float = 0.0
    plays: int = 0
    commits: int = 0
    most_out: int = 0

    def __post_init__(self) -> None:
        self.state = State(self.table, self.hosts)
        self.events: list[Event] = []
        self._agenda: list[tuple[float, int, Event]] = []
        self._order = 0

    def run(self) -> Decision:
        while True:
            decision = decide(self.state, self.limits, self.now)
            for start in decision.starts:
                self._play(start)
            if decision.turns:
                self.record([Event(Kind.TURNED, host, data={"why": why}) for host, why in decision.turns])
            elif decision.finished:
                return decision
            else:
                self._advance(decision.wake_at)

    def _play(self, start: Start) -> None:
        self.plays += 1
        attempt = f"a{self.plays}"
        self.record(intents(start, attempt))
        for host in start.hosts:
            outcome = self.behave(start, host)
            event = Event(outcome.kind, host, start.phase, start.provider, start.direction, attempt, outcome.data)
            self._order += 1
            heapq.heappush(self._agenda, (self.now + self.play_cost + outcome.after, self._order, event))

    def _advance(self, wake_at: float | None) -> None:
        """To the next moment at which something happens; all that happens then is recorded at once."""
        moments = [moment for moment in (wake_at, self._agenda[0][0] if self._agenda else None) if moment is not None]
        self.now = max(self.now, min(moments))
        happened = []
        while self._agenda and self._agenda[0][0] <= self.now:
            happened.append(heapq.heappop(self._agenda)[2])
        self.record(happened)

    def record(self, events: Iterable[Event]) -> None:
        events = list(events)
        if not events:
            return
        self.commits += 1
        if self.journal:
            events = self.journal.append(events)
        else:
            events = [replace(event, seq=len(self.events) + i) for i, event in enumerate(events, 1)]
        if self.keep:
            self.events += events
        for event in events:
            self.state.apply(event, self.now)
        self.most_out = max(self.most_out, self.state.counts.out)


class Script:
    """A behaviour: what is written for (host, "phase direction tasks") is said in order; anything else is accepted."""

    def __init__(self, lines: dict[tuple[str, str], list[Outcome]]) -> None:
        self._lines = {key: list(outcomes) for key, outcomes in lines.items()}

    def __call__(self, start: Start, host: str) -> Outcome:
        said = self._lines.get((host, f"{start.phase} {start.direction} {start.tasks}"))
        return said.pop(0) if said else Outcome()


def simulated(
    hosts: int = 3,
    lines: dict[tuple[str, str], list[Outcome]] | None = None,
    *,
    orders: Iterable[Event] = (),
    **limits: Any,
) -> Simulation:
    """A change of hosts h0, h1, … carried to its end; `orders` are an operator's, given before it begins."""
    run = Simulation(full_table(), [f"h{number}" for number in range(hosts)], Limits(**limits), Script(lines or {}))
    run.record(orders)
    run.run()
    return run
