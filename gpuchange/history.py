"""What a change's events say over time: how long each host was out of service, how long each step took. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from statistics import median
from typing import TYPE_CHECKING

from gpuchange.states import Event, Kind

if TYPE_CHECKING:
    from gpuchange.planner import State

StepRun = tuple[str, str, str, str]
"""(host, phase, provider, direction)"""


def moment(at: str) -> datetime:
    """The time of an event (ISO 8601; UTC unless it says otherwise)."""
    parsed = datetime.fromisoformat(at)
    return parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)


def seconds(start: str, end: str) -> float:
    """Seconds between two event times, for people: never used to order or to time anything out."""
    return max(0.0, (moment(end) - moment(start)).total_seconds())


def typical(changes: Iterable[Iterable[Event]]) -> dict[str, float]:
    """ "phase/provider" → median seconds from a host's first intent to its acceptance, in steps of earlier changes."""
    took: dict[str, list[float]] = {}
    for events in changes:
        begun: dict[tuple[str, str], str] = {}
        for event in events:
            step = f"{event.phase}/{event.provider}"
            if event.direction != "do":
                continue
            if event.kind is Kind.STARTED:
                begun.setdefault((event.host, step), event.at)
            elif event.kind is Kind.ACCEPTED and (event.host, step) in begun:
                took.setdefault(step, []).append(seconds(begun[event.host, step], event.at))
    return {step: median(all_of_it) for step, all_of_it in took.items()}


@dataclass
class History:
    """Fed with each event after it was folded into the state, in order.

    `out_since` has the hosts that are out of service now; `out_for` adds up what is over (seconds); `begun` has the
    time of the first intent of each step and direction; `last` each host's latest event;
    `most_out` the most hosts that were out at the same time.
    """

    out_since: dict[str, str] = field(default_factory=dict)
    out_for: dict[str, float] = field(default_factory=dict)
    begun: dict[StepRun, str] = field(default_factory=dict)
    took: dict[StepRun, float] = field(default_factory=dict)
    last: dict[str, Event] = field(default_factory=dict)
    most_out: int = 0

    def see(self, event: Event, state: State) -> None:
        if not event.host:
            return
        self.last[event.host] = event
        self._step(event)
        self._service(event, state.hosts[event.host].out)

    def _step(self, event: Event) -> None:
        run = (event.host, event.phase, event.provider, event.direction)
        if event.kind in (Kind.STARTED, Kind.PROBING):
            self.begun.setdefault(run, event.at)
        elif event.kind in (Kind.ACCEPTED, Kind.REJECTED) and run in self.begun:
            self.took[run] = seconds(self.begun[run], event.at)

    def _service(self, event: Event, out: bool) -> None:
        since = self.out_since.get(event.host)
        if out and since is None:
            self.out_since[event.host] = event.at
            self.most_out = max(self.most_out, len(self.out_since))
        elif since is not None and not out:
            self.out_for[event.host] = self.out_for.get(event.host, 0.0) + seconds(since, event.at)
            del self.out_since[event.host]

    def out_seconds(self, host: str, now: str) -> float:
        """Seconds that `host` was out of service up to `now`."""
        since = self.out_since.get(host)
        return self.out_for.get(host, 0.0) + (seconds(since, now) if since else 0.0)

    def touched(self) -> Iterator[str]:
        """Hosts that were out of service at any time."""
        return iter(sorted({*self.out_since, *self.out_for}))
