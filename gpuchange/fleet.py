"""All hosts of a change, folded from its events, and kept sorted by what they ask for.

Every host lies in exactly one pool (Ask, Group); a pool is a sorted list, so that a decision reads the front of each
pool and never the whole fleet.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpuchange.errors import IllegalTransition
from gpuchange.fold import Ask, HostState
from gpuchange.states import TRANSITIONS, Event, Kind
from gpuchange.table import Group, Table

Pool = tuple[Ask, Group | None]

STEP_KINDS = frozenset(kind for _, _, kind in TRANSITIONS)
HOST_KINDS = frozenset({Kind.TURNED, Kind.LEFT})


@dataclass
class Counts:
    """How many hosts are in each of these conditions now."""

    out: int = 0
    failed: int = 0
    turned: int = 0
    at_barrier: int = 0  # the first phase does not lie behind them yet
    refused: int = 0  # failed or held at the barrier
    touched: int = 0  # something was begun that a rollback answers for
    silent: int = 0  # in hand, and nobody answers


_CONDITIONS: Mapping[str, Callable[[HostState], bool]] = {
    "out": lambda host: host.out,
    "failed": lambda host: host.failed,
    "turned": lambda host: bool(host.turned) and not host.left,
    "at_barrier": lambda host: not host.passed,
    "refused": lambda host: host.failed and not host.passed,
    "touched": lambda host: host.touched > 0,
    "silent": lambda host: host.stance.ask in (Ask.NOTHING, Ask.GO_ON) and host.unreachable,
}


def _conditions(host: HostState) -> tuple[bool, ...]:
    return tuple(condition(host) for condition in _CONDITIONS.values())


class State:
    """The change as its events tell it. `hosts` are in inventory order."""

    def __init__(self, table: Table, hosts: Sequence[str]) -> None:
        self.table = table
        self.names = tuple(hosts)
        self.hosts = {name: HostState(name, order, table) for order, name in enumerate(self.names)}
        self.pools: dict[Pool, list[tuple[float, int]]] = {}
        self.counts = Counts()
        self.machines: dict[str, str] = {}  # machine-id → host
        self.to_turn: set[str] = set()  # hosts that a failure elsewhere would turn back
        self._unsettled = list(range(len(self.names)))
        for host in self.hosts.values():
            self._enter(host)

    def apply(self, event: Event, now: float = 0.0) -> None:
        """Fold one event. `now`: the caller's clock (seconds); waits that the event asks for end relative to it.

        Raises IllegalTransition, also for a host or step that is not in this change.
        """
        if event.kind not in STEP_KINDS and event.kind not in HOST_KINDS:
            self._note(event)
            return
        host = self.hosts.get(event.host)
        if host is None or (event.kind in STEP_KINDS and (event.phase, event.provider) not in host.steps):
            raise _stranger(event)
        before, pool, conditions = host.stance, (host.stance.ask, host.stance.group), _conditions(host)
        if event.kind in STEP_KINDS:
            host.step_event(event, now)
        else:
            host.host_event(event)
        self._leave(pool, (before.due, host.order))
        self._enter(host, conditions)

    def _note(self, event: Event) -> None:
        host = self.hosts.get(event.host)
        if host and event.data.get("machine_id"):
            self.machines[str(event.data["machine_id"])] = host.name
        if host and event.data.get("unmarked"):
            host.unmarked = True

    @property
    def finished(self) -> bool:
        """No host goes on unless an operator says so."""
        return all(host.finished for host in self.hosts.values())

    def _leave(self, pool: Pool, entry: tuple[float, int]) -> None:
        entries = self.pools[pool]
        del entries[bisect_left(entries, entry)]

    def _enter(self, host: HostState, before: tuple[bool, ...] = (False,) * len(_CONDITIONS)) -> None:
        stance = host.stance
        insort(self.pools.setdefault((stance.ask, stance.group), []), (stance.due, host.order))
        after = _conditions(host)
        if after != before:
            for name, was, is_now in zip(_CONDITIONS, before, after, strict=True):
                if was != is_now:
                    setattr(self.counts, name, getattr(self.counts, name) + (1 if is_now else -1))
        movable = host.touched > 0 and not host.turned and not host.left and stance.ask is not Ask.OPERATOR
        (self.to_turn.add if movable else self.to_turn.discard)(host.name)
        self._settle(host)

    def _settle(self, host: HostState) -> None:
        at = bisect_left(self._unsettled, host.order)
        listed = at < len(self._unsettled) and self._unsettled[at] == host.order
        settled = host.done or host.left
        if settled and listed:
            del self._unsettled[at]
        elif not settled and not listed:
            self._unsettled.insert(at, host.order)

    def first_unsettled(self) -> int:
        """The inventory position of the first host that is neither done nor left; the fleet's size when none is."""
        return self._unsettled[0] if self._unsettled else len(self.names)

    def size(self, *asks: Ask) -> int:
        return sum(len(entries) for (ask, _), entries in self.pools.items() if ask in asks)

    def waiting_for(self, *asks: Ask) -> Iterator[tuple[Group, list[tuple[float, int]]]]:
        """The pools of these asks that are not empty, as (group, sorted (due, inventory position))."""
        for (ask, group), entries in self.pools.items():
            if ask in asks and entries and group:
                yield group, entries

    def those(self, ask: Ask) -> list[HostState]:
        """The hosts that ask for this, in inventory order."""
        entries = self.pools.get((ask, None), ())
        return [self.hosts[self.names[order]] for _, order in entries]


def _stranger(event: Event) -> IllegalTransition:
    return IllegalTransition(
        f"{event.kind} speaks of a host or step that is not in this change",
        where=f"{event.host} {event.phase}/{event.provider}, event {event.seq}",
        remedy="the journal was written by another version or was edited: run gpuchange audit verify",
    )
