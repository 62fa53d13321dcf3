"""The shape of a row of the phase table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Play:
    """What one direction of a phase plays: `tasks` (apply or undo) of the roles of `phase`'s providers."""

    phase: str
    tasks: Literal["apply", "undo"]


@dataclass(frozen=True)
class NothingToUndo:
    """The phase changed nothing that has to be taken back."""


@dataclass(frozen=True)
class Irreversible:
    """The phase cannot be taken back, and why."""

    why: str


NOTHING_TO_UNDO = NothingToUndo()


@dataclass(frozen=True)
class Phase:
    """One row: forward play and undo; `undo` has no default on purpose.

    `takes_out` marks the phase whose intent makes the host *out*; `brings_back` the one whose acceptance ends it.
    `reverse`: the providers are applied in reverse order (release mirrors drain).
    """

    name: str
    does: str
    do: Play
    undo: Play | NothingToUndo | Irreversible
    takes_out: bool = False
    brings_back: bool = False
    reverse: bool = False
