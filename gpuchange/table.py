"""The plan's own table: the phases with their providers, as the ordered steps that every host takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, Self

from gpuchange.phase import Irreversible, NothingToUndo, Phase, Play

StepKey = tuple[str, str]
"""(phase, provider)"""

Direction = Literal["do", "undo"]
Tasks = Literal["apply", "undo", "probe"]


@dataclass(frozen=True)
class Step:
    """One phase done by one provider."""

    phase: Phase
    provider: str

    @property
    def key(self) -> StepKey:
        return self.phase.name, self.provider

    def play(self, direction: str) -> Play:
        """What is played in this direction ("do" or "undo"). Raises ValueError when it has no undo to play."""
        play = self.phase.do if direction == "do" else self.phase.undo
        if not isinstance(play, Play):
            raise ValueError(f"{self.phase.name} has no undo to play")
        return play

    @property
    def undoable(self) -> bool:
        """Whether it changes something that a rollback has to answer for."""
        return not isinstance(self.phase.undo, NothingToUndo)


class Group(NamedTuple):
    """What hosts that share one play have in common.

    `role` is the role that plays it; `aim` is the mode that a probe asks about (release's do is drain's undo).
    """

    phase: str
    provider: str
    direction: Direction
    tasks: Tasks
    role: str
    aim: Literal["apply", "undo"]


@dataclass(frozen=True)
class Table:
    """Ordered steps. The first phase is the barrier: no host is taken out before every host has passed it."""

    steps: tuple[Step, ...]

    @classmethod
    def build(cls, phases: Sequence[Phase], providers_of: Callable[[str], Sequence[str]]) -> Self:
        """`providers_of(phase)` in the plan's order; a phase that plays another's roles (release) takes that one's.

        Raises ValueError when nothing would take a host out of service before it is changed.
        """
        steps: list[Step] = []
        for phase in phases:
            names = list(providers_of(phase.do.phase))
            steps += [Step(phase, name) for name in (reversed(names) if phase.reverse else names)]
        if not any(step.phase.takes_out for step in steps):
            raise ValueError("no provider takes the hosts out of service")
        return cls(tuple(steps))

    @cached_property
    def keys(self) -> tuple[StepKey, ...]:
        return tuple(step.key for step in self.steps)

    @cached_property
    def index(self) -> dict[StepKey, int]:
        return {key: at for at, key in enumerate(self.keys)}

    def step(self, phase: str, provider: str) -> Step:
        return self.steps[self.index[phase, provider]]

    def end_of(self, phase: str) -> int:
        """The position after the last step of `phase`. Raises ValueError when the plan has no such phase."""
        return max(at for at, step in enumerate(self.steps, 1) if step.phase.name == phase)

    @cached_property
    def undoable(self) -> frozenset[StepKey]:
        return frozenset(step.key for step in self.steps if step.undoable)

    @cached_property
    def barrier(self) -> int:
        """How many steps the first phase has."""
        return sum(step.phase.name == self.steps[0].phase.name for step in self.steps)

    @cached_property
    def taking_out(self) -> tuple[StepKey, ...]:
        return tuple(step.key for step in self.steps if step.phase.takes_out)

    @cached_property
    def bringing_back(self) -> tuple[StepKey, ...]:
        return tuple(step.key for step in self.steps if step.phase.brings_back)

    @cached_property
    def groups(self) -> tuple[dict[tuple[Direction, bool], Group], ...]:
        """For each step, by (direction, probe?): the play that it may need next."""
        return tuple(_groups(step) for step in self.steps)


def _groups(step: Step) -> dict[tuple[Direction, bool], Group]:
    ways: tuple[tuple[Direction, Play | NothingToUndo | Irreversible], ...] = (
        ("do", step.phase.do),
        ("undo", step.phase.undo),
    )
    found: dict[tuple[Direction, bool], Group] = {}
    for direction, play in ways:
        if isinstance(play, Play):
            role = f"{play.phase}_{step.provider}"
            found[direction, False] = Group(*step.key, direction, play.tasks, role, play.tasks)
            found[direction, True] = Group(*step.key, direction, "probe", role, play.tasks)
    return found
