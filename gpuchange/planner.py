"""Which plays may start now, or why none: a pure function of the folded journal, the limits and the clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

from gpuchange.errors import WORST_FIRST
from gpuchange.fleet import State
from gpuchange.fold import Ask, HostState, StepState
from gpuchange.states import Status
from gpuchange.table import Direction, Group, Step, StepKey, Table, Tasks

__all__ = [
    "Decision",
    "HostState",
    "Limits",
    "Start",
    "State",
    "Step",
    "StepKey",
    "StepState",
    "Table",
    "decide",
    "exit_code",
    "resumable",
    "summary",
]


@dataclass(frozen=True)
class Limits:
    """How carefully. `max_unavailable`: hosts out at once; `canary`: first hosts of the inventory that must be done
    before any other is taken out; `stop_after_failures`: so many failed hosts close the gate for new ones.
    """

    max_unavailable: int = 1
    canary: int = 0
    stop_after_failures: int = 1
    on_failure: Literal["host", "change", "hold"] = "host"


@dataclass(frozen=True)
class Start:
    """One play: these hosts take this step in this direction. `role`, `aim`: see Group."""

    hosts: tuple[str, ...]
    phase: str
    provider: str
    direction: Direction
    tasks: Tasks
    role: str = ""
    aim: Literal["apply", "undo"] = "apply"


@dataclass(frozen=True)
class Decision:
    """What to do now. `turns`: (host, why) to be written as TURNED; then decide again.

    `wake_at`: when to decide again if nothing happens before; `finished`: nothing is in flight and nothing will come;
    `blocked`: who or what does not go on, and why, for people.
    """

    starts: tuple[Start, ...] = ()
    turns: tuple[tuple[str, str], ...] = ()
    wake_at: float | None = None
    finished: bool = False
    blocked: dict[str, str] = field(default_factory=dict)


def decide(
    state: State,
    limits: Limits,
    now: float,
    *,
    stopping: bool = False,
    last_phase: str = "",
    only_back: bool = False,
) -> Decision:
    """What may start at `now` (same clock as State.apply's); with `last_phase` nothing after that phase, with
    `only_back` nothing but on hosts that were turned back.

    Costs O(what starts), not O(hosts); `only_back` looks at those that could go on as well.
    """
    in_flight = state.size(Ask.NOTHING) > 0
    stuck = {host.name: host.stance.why for ask in (Ask.OPERATOR, Ask.TURN) for host in state.those(ask)}
    if stopping:
        return Decision(finished=not in_flight, blocked=stuck | {"change": "stopping: nothing new is started"})
    turns = _turns(state, limits)
    turning = {host for host, _ in turns}
    end = _end(state, last_phase)
    fresh = "" if not _network_suspect(state) else "many hosts stopped answering at once: is it our own network?"
    outward = _outward(state, limits, "an order to go back" if only_back else fresh, end)
    ready = chain(_due(state, now, end), () if fresh else _fresh(state, end), outward)
    starts = _starts(state, _turned(state, ready) if only_back else ready, turning)
    wake_at = now if turns else _wake_at(state, now, end, only_back)
    finished = not (starts or in_flight or wake_at is not None)
    return Decision(starts, turns, wake_at, finished, stuck | _gates(state, limits, fresh))


_STUCK = frozenset({Status.HELD, Status.FAILED, Status.UNDO_HELD})

Ready = tuple[Group, Sequence[int]]


def _turns(state: State, limits: Limits) -> tuple[tuple[str, str], ...]:
    """A host that failed before it was touched has nothing to take back: it is not turned, so it can be retried."""
    failed = state.those(Ask.TURN)
    if limits.on_failure == "host":
        return tuple((host.name, host.stance.why or "a step failed") for host in failed if host.touched)
    if limits.on_failure == "change" and (failed or state.counts.turned):
        why = "another host failed and the plan says: roll back the whole change"
        reasons = {host.name: host.stance.why or "a step failed" for host in failed}
        return tuple((name, reasons.get(name, why)) for name in state.movable())
    return ()


def _refused(state: State) -> bool:
    return state.counts.refused > 0 and not state.counts.touched


def _end(state: State, last_phase: str) -> int:
    """The position in the table where going forward ends for now.

    When the barrier refused somebody, the others' barrier steps still end: all that is wrong shows at once.
    """
    if _refused(state):
        return state.table.barrier
    return state.table.end_of(last_phase) if last_phase else len(state.table.steps)


def _network_suspect(state: State) -> bool:
    """At least three hosts, and more than half of those that we deal with now, have stopped answering."""
    silent = state.counts.silent
    return silent >= 3 and 2 * silent > state.size(Ask.NOTHING, Ask.GO_ON, Ask.START)


def _open(state: State, group: Group, end: int) -> bool:
    return group.direction == "undo" or state.table.index[group.phase, group.provider] < end


def _due(state: State, now: float, end: int) -> Iterator[Ready]:
    for group, entries in state.waiting_for(Ask.GO_ON):
        if _open(state, group, end):
            yield group, [order for due, order in _until(entries, now)]


def _until(entries: Sequence[tuple[float, int]], now: float) -> Iterator[tuple[float, int]]:
    for entry in entries:
        if entry[0] > now:
            return
        yield entry


def _fresh(state: State, end: int) -> Iterator[Ready]:
    for group, entries in state.waiting_for(Ask.START):
        if _open(state, group, end):
            yield group, [order for _, order in entries]


def _turned(state: State, ready: Iterator[Ready]) -> Iterator[Ready]:
    for group, orders in ready:
        yield group, [order for order in orders if state.hosts[state.names[order]].turned]


def _outward(state: State, limits: Limits, fresh: str, end: int) -> Iterator[Ready]:
    """Starts that take hosts out of service, within the free slots; going back goes first, then inventory order."""
    free = limits.max_unavailable - state.counts.out
    for ask in (Ask.SLOT_BACK, Ask.SLOT):
        if free <= 0 or (ask is Ask.SLOT and (fresh or _drain_gate(state, limits))):
            return
        fronts = [
            [(order, group) for _, order in entries[:free]]
            for group, entries in state.waiting_for(ask)
            if _open(state, group, end)
        ]
        for order, group in sorted(chain.from_iterable(fronts))[:free]:
            if ask is Ask.SLOT_BACK or _admitted(state, limits, order):
                free -= 1
                yield group, [order]


def _admitted(state: State, limits: Limits, order: int) -> bool:
    return order < limits.canary or state.first_unsettled() >= limits.canary


def _drain_gate(state: State, limits: Limits) -> str:
    """Why no further host may be taken out, canaries included; "" when the gate is open."""
    counts = state.counts
    if counts.at_barrier:
        return f"{counts.at_barrier} hosts have not passed {state.table.steps[0].phase.name}"
    if counts.failed >= limits.stop_after_failures:
        return f"stopped after {counts.failed} failed hosts (stop_after_failures: {limits.stop_after_failures})"
    if limits.on_failure == "change" and counts.failed:
        return "a host failed and the plan says: roll back the whole change"
    return ""


def _gates(state: State, limits: Limits, fresh: str) -> dict[str, str]:
    """Why the hosts at a gate wait, one sentence a gate."""
    waiting: dict[Group, int] = {}
    for group, entries in state.waiting_for(Ask.SLOT, Ask.SLOT_BACK):
        waiting[group] = len(entries)
    gates = {
        f"{group.phase}/{group.provider}": f"{count} hosts wait: {_why_waiting(state, limits, fresh, group)}"
        for group, count in waiting.items()
    }
    if _refused(state):
        phase, counts = state.table.steps[0].phase.name, state.counts
        gates[phase] = f"{counts.refused} of {len(state.names)} hosts did not pass: nothing is changed"
    return gates | ({"network": fresh} if fresh else {})


def _why_waiting(state: State, limits: Limits, fresh: str, group: Group) -> str:
    gate = "" if group.direction == "undo" else fresh or _drain_gate(state, limits)
    if not gate and state.counts.out >= limits.max_unavailable:
        gate = f"{state.counts.out} of {limits.max_unavailable} hosts are out"
    first = min(state.first_unsettled(), len(state.names) - 1)
    return gate or f"for canary {state.names[first]}"


def _starts(state: State, ready: Iterator[Ready], turning: set[str]) -> tuple[Start, ...]:
    """One play for each group; undo first, then the steps nearest to the end."""
    shared: dict[Group, list[int]] = {}
    for group, orders in ready:
        shared.setdefault(group, []).extend(orders)
    index = state.table.index
    ordered = sorted(shared, key=lambda group: (group.direction == "do", -index[group.phase, group.provider]))
    starts = []
    for group in ordered:
        hosts = tuple(name for order in sorted(shared[group]) if (name := state.names[order]) not in turning)
        if hosts:
            starts.append(Start(hosts, *group))
    return tuple(starts)


def _wake_at(state: State, now: float, end: int, only_back: bool) -> float | None:
    def counts(order: int) -> bool:
        return not only_back or bool(state.hosts[state.names[order]].turned)

    later = [
        next((due for due, order in entries if due > now and counts(order)), None)
        for group, entries in state.waiting_for(Ask.GO_ON)
        if _open(state, group, end)
    ]
    return min((due for due in later if due is not None), default=None)


def resumable(state: State) -> tuple[tuple[str, Step, Direction], ...]:
    """(host, step, direction) that a resume takes up again without being told.

    Steps held or failed because nobody answered or somebody else owned the host, and what failed before its host was
    touched: a resume says that the cause is gone, and RETRY looks before it acts.
    """
    found: list[tuple[str, Step, Direction]] = []
    for ask in (Ask.OPERATOR, Ask.TURN):
        for host in state.those(ask):
            step = state.table.steps[host.at]
            status = host.steps[step.key].status
            kept_out = status in _STUCK and (host.unreachable or host.refused)
            if kept_out or (status is Status.FAILED and not host.touched):
                found.append((host.name, step, "undo" if status is Status.UNDO_HELD else "do"))
    return tuple(found)


def exit_code(state: State) -> int:
    """The worst of all hosts (docs/exit-codes.md). A change that stopped before its end, unfailed, is 5."""
    codes = {_host_code(host, untouched=not state.counts.touched) for host in state.hosts.values()}
    worst = next((code for code in WORST_FIRST if code in codes), 0)
    return worst or (0 if all(host.done or host.left or host.rolled_back for host in state.hosts.values()) else 5)


def _host_code(host: HostState, untouched: bool) -> int:
    if any(step.status is Status.UNDO_FAILED for step in host.steps.values()):
        return 6
    if host.rolled_back:
        return 0 if host.ordered else 3
    if host.held and host.refused and not host.touched:
        return 7
    if host.failed and not host.touched and (untouched or not host.held):
        return 4 if host.unreachable else 1
    return 5 if host.out or host.failed else 0


def summary(state: State) -> dict[str, str]:
    """Where each host stands, in a word or two."""
    return {name: _word(host) for name, host in state.hosts.items()}


def _word(host: HostState) -> str:
    phase = host.frontier[0] if host.frontier else ""
    words = (
        (host.left, "left"),
        (host.as_wanted and not host.touched, "as wanted"),
        (host.done, "done"),
        (host.rolled_back, "rolled back"),
        (host.failed and not host.touched and not host.held, "failed before change"),
        (host.held, f"held: {phase}"),
        (host.failed and not host.turned, f"failed: {phase}"),
        (bool(host.turned), f"going back: {phase}"),
        (host.out, f"out: {phase}"),
        (host.touched > 0 or any(step.attempts for step in host.steps.values()), "in service"),
    )
    return next((word for true, word in words if true), "pending")
