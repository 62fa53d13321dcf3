"""What the events of a change fold to: where every step and every host stands, and what each host asks for next.

Everything here is derived from events and can be thrown away; only the journal is kept.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from gpuchange.phase import Irreversible
from gpuchange.states import Event, Kind, Status, after
from gpuchange.table import Direction, Group, Step, StepKey, Table


class StepState(NamedTuple):
    """One step of one host.

    `waited`: seconds of `again` so far in this direction; `due`: look again at this time of the caller's clock;
    `attempts`: plays begun, probes too; `why`: the last reason given. Of the losses since its last word: `lost` counts
    them, `lost_waited` (seconds) is how long we waited for an answer, `unreachable` and `silent` say what the last was.
    """

    status: Status = Status.PENDING
    waited: float = 0.0
    due: float = 0.0
    attempts: int = 0
    lost: int = 0
    unreachable: bool = False
    why: str = ""
    lost_waited: float = 0.0
    silent: bool = False
    refused: bool = False  # held because the host belongs to another change or a newer controller


UNTOUCHED = StepState()

_INTENTS = frozenset({Kind.STARTED, Kind.PROBING})
_ANSWERS = frozenset({Kind.RETRY, Kind.MARKED})
_FIRST_UNDO = frozenset({Status.DONE, Status.FAILED, Status.HELD, Status.WAITING})


def moved(step: StepState, event: Event, now: float) -> StepState:
    """The step after one of its events. Raises IllegalTransition."""
    status = after(step.status, event)
    attempts = step.attempts
    if event.kind in _INTENTS:
        if status is Status.UNDOING and step.status in _FIRST_UNDO:
            return StepState(status, attempts=attempts + 1, why=step.why)
        return StepState(status, step.waited, 0.0, attempts + 1, *step[4:])
    data, why = event.data, str(event.data.get("why", ""))
    unreachable = bool(data.get("unreachable", step.unreachable and event.kind is Kind.HELD))
    if event.kind is Kind.AGAIN:
        pause = float(data["after"])
        waited = float(data.get("waited", step.waited + pause))
        return StepState(status, waited, now + pause, attempts, why=why)
    if event.kind is Kind.LOST:
        due = now + float(data.get("after", 0.0)) if unreachable else 0.0
        lost_waited, silent = float(data.get("waited", step.lost_waited)), bool(data.get("silent", False))
        return StepState(status, step.waited, due, attempts, step.lost + 1, unreachable, why, lost_waited, silent)
    waited = 0.0 if event.kind is Kind.RETRY else step.waited
    return StepState(status, waited, 0.0, attempts, 0, unreachable, why, refused="refused" in data)


class Ask(StrEnum):
    """What a host asks for next."""

    START = "start"  # its next step, for the first time
    GO_ON = "go_on"  # the same step again, a probe, or an undo
    SLOT = "slot"  # a start that would take it out of service
    SLOT_BACK = "slot_back"  # an undo that would take it out of service
    NOTHING = "nothing"  # a play has it in hand
    TURN = "turn"  # its step failed: somebody has to say what now
    OPERATOR = "operator"  # a human has to decide
    END = "end"


class Stance(NamedTuple):
    """What one host asks for, with which play (when it asks for one), from when on, and why (when it is stuck)."""

    ask: Ask
    group: Group | None = None
    due: float = 0.0
    why: str = ""


_S = Status
_IN_FLIGHT = {_S.DOING: "fly", _S.LOOKING: "fly", _S.UNDOING: "fly", _S.UNDO_LOOKING: "fly"}
_FORWARD = _IN_FLIGHT | {
    _S.PENDING: "start",
    _S.WAITING: "do",
    _S.UNSURE: "probe do",
    _S.FAILED: "failed",
    _S.HELD: "operator",
}
_BACK = _IN_FLIGHT | {
    _S.DONE: "undo",
    _S.FAILED: "undo",
    _S.HELD: "undo",
    _S.WAITING: "undo",
    _S.UNSURE: "probe do",  # what may still be running must not be undone
    _S.UNDO_WAITING: "undo",
    _S.UNDO_UNSURE: "probe undo",
    _S.UNDO_FAILED: "operator",
    _S.UNDO_HELD: "operator",
}
_BACK_ONE_WAY = _IN_FLIGHT | {
    _S.DONE: "one way",
    _S.FAILED: "one way",
    _S.HELD: "one way",
    _S.WAITING: "one way",
    _S.UNSURE: "probe do",
}
_PLAYS: dict[str, tuple[Ask, tuple[Direction, bool]]] = {
    "start": (Ask.START, ("do", False)),
    "do": (Ask.GO_ON, ("do", False)),
    "undo": (Ask.GO_ON, ("undo", False)),
    "probe do": (Ask.GO_ON, ("do", True)),
    "probe undo": (Ask.GO_ON, ("undo", True)),
}
_STUCK = {"fly": Ask.NOTHING, "failed": Ask.TURN, "operator": Ask.OPERATOR, "one way": Ask.OPERATOR}


def _move_back(step: Step, status: Status) -> str:
    """What going back makes of one step; "" when it is nothing."""
    if isinstance(step.phase.undo, Irreversible):
        return _BACK_ONE_WAY.get(status, "")
    return (_BACK if step.undoable else _IN_FLIGHT).get(status, "")


class HostState:
    """One host of the change. `steps` has every step of the table; `turned` says why it goes back ("": it does not).

    Folding an event is kept cheap; what follows from the steps is worked out when it is asked for.
    """

    __slots__ = (
        *("name", "order", "table", "steps", "turned", "ordered", "left", "touched", "unmarked"),
        *("_at", "_no", "_stance", "_undo_held", "_yes"),
    )

    def __init__(self, name: str, order: int, table: Table) -> None:
        self.name, self.order, self.table = name, order, table
        self.steps: dict[StepKey, StepState] = dict.fromkeys(table.keys, UNTOUCHED)
        self.turned = ""
        self.ordered = False  # an operator, not a failure, turned it back
        self.left = False
        self.touched = 0  # steps begun that a rollback has to answer for
        self.unmarked = False  # its owner marker was given back
        self._yes = self._no = False  # what the barrier's reports say about as_wanted
        self._undo_held = False  # it was turned when a step was held already: that answers the hold
        self._at = 0  # where the host stands: every step before it (going back: after it) is settled
        self._stance: Stance | None = None

    @property
    def stance(self) -> Stance:
        if self._stance is None:
            self._stance = self._ask()
        return self._stance

    @property
    def at(self) -> int:
        """The position of the frontier in the table; one past its ends at the end of the way."""
        return self._at if self.stance else -1

    @property
    def frontier(self) -> StepKey | None:
        """The step it stands at; None at the end of the way."""
        return self.table.keys[self.at] if 0 <= self.at < len(self.table.keys) else None

    @property
    def out(self) -> bool:
        """From the intent to take it out until everything that brings it back is accepted (going back: undone)."""
        inside = (Status.PENDING, Status.UNDONE)
        if not self.touched or all(self.steps[key].status in inside for key in self.table.taking_out):
            return False
        back = self.table.bringing_back
        return not back or any(self.steps[key].status is not Status.DONE for key in back)

    @property
    def passed(self) -> bool:
        """Whether the barrier lies behind it."""
        return self.left or all(self.steps[key].status is Status.DONE for key in self.table.keys[: self.table.barrier])

    @property
    def as_wanted(self) -> bool:
        """Every barrier report that knows says that there is nothing to change."""
        return self._yes and not self._no and self.passed

    @property
    def done(self) -> bool:
        return not self.touched if self.as_wanted else self.at == len(self.table.keys)

    @property
    def in_flight(self) -> bool:
        return any(step.status in _IN_FLIGHT for step in self.steps.values())

    @property
    def finished(self) -> bool:
        """Nothing more will be done on it unless an operator says so."""
        return self.stance.ask in (Ask.END, Ask.OPERATOR)

    @property
    def held(self) -> bool:
        return self.stance.ask is Ask.OPERATOR

    @property
    def ended_well(self) -> bool:
        """It serves, and no play of this change needs it or has changed it: its owner marker may go."""
        ask = self.stance.ask
        return not self.out and (ask is Ask.END or (not self.touched and ask is not Ask.NOTHING))

    @property
    def rolled_back(self) -> bool:
        began = self.touched > 0 or self.ordered  # what was ordered back may turn out never to have begun
        return bool(self.turned) and self.stance.ask is Ask.END and began and not self.left

    @property
    def failed(self) -> bool:
        """Counts for stop_after_failures: held, failed, going back or rolled back, unless an operator let it be."""
        bad = bool(self.turned) or self.stance.ask in (Ask.OPERATOR, Ask.TURN)
        return bad and not self.left and not self.done

    @property
    def begun(self) -> bool:
        """Something beyond the barrier was started: the host may carry our owner marker."""
        return any(self.steps[key].attempts for key in self.table.keys[self.table.barrier :])

    @property
    def refused(self) -> bool:
        """The step it stands at was shut out by somebody else's owner marker."""
        key = self.frontier
        return key is not None and self.steps[key].refused

    @property
    def unreachable(self) -> bool:
        """The step it stands at was last heard of as: nobody answers."""
        key = self.frontier
        return self.steps[key].unreachable if key else any(step.unreachable for step in self.steps.values())

    def step_event(self, event: Event, now: float) -> None:
        """Fold one event of a step. Raises IllegalTransition."""
        key, kind = (event.phase, event.provider), event.kind
        before = self.steps[key]
        then = self.steps[key] = moved(before, event, now)
        self._stance = None
        if key in self.table.undoable:
            self.touched += (before.status is Status.PENDING) - (then.status is Status.PENDING)
        if kind in _INTENTS:
            self.unmarked = False
        elif kind is Kind.ACCEPTED:
            self._hear(key, event.data.get("as_wanted"))
        elif kind is Kind.HELD:
            self._undo_held = False
        elif kind in _ANSWERS:
            self.left = False  # an operator's later word replaces the earlier

    def _hear(self, key: StepKey, as_wanted: bool | None) -> None:
        if as_wanted is not None and self.table.index[key] < self.table.barrier:
            self._yes |= as_wanted
            self._no |= not as_wanted

    def wake(self, key: StepKey) -> None:
        """What the step waited for has happened: it is looked at again at once."""
        self.steps[key] = self.steps[key]._replace(due=0.0)
        self._stance = None

    def host_event(self, event: Event) -> None:
        """Fold TURNED or LEFT."""
        self.left = event.kind is Kind.LEFT
        if event.kind is Kind.TURNED:
            self.ordered = self.ordered if self.turned else bool(event.data.get("ordered"))
            self.turned = self.turned or str(event.data.get("why") or "turned back")
            self._at = len(self.table.keys) - 1
            self._undo_held = True
        self._stance = None

    def _ask(self) -> Stance:
        if self.left:
            return Stance(Ask.NOTHING if self.in_flight else Ask.END)
        return self._ask_back() if self.turned else self._ask_forward()

    def _ask_forward(self) -> Stance:
        keys = self.table.keys
        while self._at < len(keys) and self.steps[keys[self._at]].status is Status.DONE:
            self._at += 1
        if self._at == len(keys) or (self._at == self.table.barrier and self.as_wanted):
            return Stance(Ask.END)
        return self._next(_FORWARD[self.steps[keys[self._at]].status])

    def _ask_back(self) -> Stance:
        while self._at >= 0:
            status = self.steps[self.table.keys[self._at]].status
            move = _move_back(self.table.steps[self._at], status)
            if move == "undo" and status is Status.HELD and not self._undo_held:
                move = "operator"
            if move:
                return self._next(move)
            self._at -= 1
        return Stance(Ask.END)

    def _next(self, move: str) -> Stance:
        step, state = self.table.steps[self._at], self.steps[self.table.keys[self._at]]
        if move not in _PLAYS:
            undo = step.phase.undo
            why = undo.why if move == "one way" and isinstance(undo, Irreversible) else state.why
            return Stance(_STUCK[move], None, 0.0, why)
        ask, way = _PLAYS[move]
        group = self.table.groups[self._at][way]
        if ask is Ask.START and step.phase.takes_out and not self.out:
            ask = Ask.SLOT
        if way == ("undo", False) and step.phase.brings_back and not self.out:
            ask = Ask.SLOT_BACK
        return Stance(ask, group, state.due, state.why)
