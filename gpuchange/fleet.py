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
Entry = tuple[float, int]
"""(due, inventory position)"""

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


class State:
    """The change as its events tell it. `hosts` are in inventory order.

    `apply` only folds; the pools and counts follow when they are next asked for.
    """

    def __init__(self, table: Table, hosts: Sequence[str]) -> None:
        self.table = table
        self.names = tuple(hosts)
        self.hosts = {name: HostState(name, order, table) for order, name in enumerate(self.names)}
        self.machines: dict[str, str] = {}  # machine-id → host
        self._moved: dict[str, HostState] = dict(self.hosts)
        self._pools: dict[Pool, list[Entry]] = {}
        self._filed: list[tuple[Pool, Entry] | None] = [None] * len(self.names)
        self._conditions: list[tuple[bool, ...]] = [(False,) * len(_CONDITIONS)] * len(self.names)
        self._counts = Counts()
        self._movable: set[str] = set()
        self._unsettled = list(range(len(self.names)))

    def apply(self, event: Event, now: float = 0.0) -> None:
        """Fold one event. `now`: the caller's clock (seconds); waits that the event asks for end relative to it.

        Raises IllegalTransition, also for a host or step that is not in this change; the state is then as before.
        """
        host = self.hosts.get(event.host)
        if event.kind in STEP_KINDS:
            if host is None or (event.phase, event.provider) not in host.steps:
                raise _stranger(event)
            host.step_event(event, now)
            self._moved[event.host] = host
        elif event.kind in HOST_KINDS:
            if host is None:
                raise _stranger(event)
            host.host_event(event)
            self._moved[event.host] = host
        elif host is not None:
            self._note(host, event)

    def _note(self, host: HostState, event: Event) -> None:
        if event.data.get("machine_id"):
            self.machines[str(event.data["machine_id"])] = host.name
        if event.data.get("unmarked"):
            host.unmarked = True
        if event.data.get("confirmed"):
            if (event.phase, event.provider) not in host.steps:
                raise _stranger(event)
            host.wake((event.phase, event.provider))
            self._moved[host.name] = host

    @property
    def finished(self) -> bool:
        """No host goes on unless an operator says so."""
        return all(host.finished for host in self.hosts.values())

    @property
    def counts(self) -> Counts:
        self._catch_up()
        return self._counts

    def size(self, *asks: Ask) -> int:
        """How many hosts ask for one of these."""
        self._catch_up()
        return sum(len(entries) for (ask, _), entries in self._pools.items() if ask in asks)

    def waiting_for(self, *asks: Ask) -> Iterator[tuple[Group, list[Entry]]]:
        """The pools of these asks that are not empty, as (group, sorted entries)."""
        self._catch_up()
        for (ask, group), entries in self._pools.items():
            if ask in asks and entries and group:
                yield group, entries

    def those(self, ask: Ask) -> list[HostState]:
        """The hosts that ask for this without a play, in inventory order."""
        self._catch_up()
        return [self.hosts[self.names[order]] for _, order in self._pools.get((ask, None), ())]

    def movable(self) -> list[str]:
        """Hosts that a failure elsewhere would turn back: begun, not held for a human, not turned or left yet."""
        self._catch_up()
        return sorted(self._movable, key=lambda name: self.hosts[name].order)

    def first_unsettled(self) -> int:
        """The inventory position of the first host that is neither done nor left; the fleet's size when none is."""
        self._catch_up()
        return self._unsettled[0] if self._unsettled else len(self.names)

    def _catch_up(self) -> None:
        for host in self._moved.values():
            self._file(host)
            self._count(host)
            self._settle(host)
        self._moved.clear()

    def _file(self, host: HostState) -> None:
        filed = self._filed[host.order]
        if filed:
            entries = self._pools[filed[0]]
            del entries[bisect_left(entries, filed[1])]
        stance = host.stance
        pool, entry = (stance.ask, stance.group), (stance.due, host.order)
        insort(self._pools.setdefault(pool, []), entry)
        self._filed[host.order] = (pool, entry)

    def _count(self, host: HostState) -> None:
        before = self._conditions[host.order]
        after = tuple(condition(host) for condition in _CONDITIONS.values())
        if after != before:
            self._conditions[host.order] = after
            for name, was, now in zip(_CONDITIONS, before, after, strict=True):
                setattr(self._counts, name, getattr(self._counts, name) + now - was)

    def _settle(self, host: HostState) -> None:
        movable = host.touched and not host.turned and not host.left and not host.held
        (self._movable.add if movable else self._movable.discard)(host.name)
        at = bisect_left(self._unsettled, host.order)
        listed = at < len(self._unsettled) and self._unsettled[at] == host.order
        settled = host.done or host.left
        if settled and listed:
            del self._unsettled[at]
        elif not settled and not listed:
            self._unsettled.insert(at, host.order)


def _stranger(event: Event) -> IllegalTransition:
    return IllegalTransition(
        f"{event.kind} speaks of a host or step that is not in this change",
        where=f"{event.host} {event.phase}/{event.provider}, event {event.seq}",
        remedy="the journal was written by another version or was edited: run gpuchange audit verify",
    )
