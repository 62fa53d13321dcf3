"""What is wrong with a plan: collected, ordered by position, said in one go."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpuchange.errors import PlanError

Path = tuple[str | int, ...]
MAX_SHOWN = 20


class Mark(NamedTuple):
    """Line and column, both counted from 1."""

    line: int
    column: int


@dataclass(frozen=True)
class Problem:
    """One fault: where, what, what to do. `path` is the key it belongs to: later faults of it are not repeated."""

    mark: Mark
    what: str
    remedy: str
    path: Path | None = None


class ProblemsFound(Exception):
    """Carries problems to the edge, where the file's name is known."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(problems)
        self.problems = tuple(problems)


def plan_error(problems: Iterable[Problem], source: str) -> PlanError:
    """All problems as one PlanError, the first line first."""
    ordered = sorted(set(problems), key=lambda problem: (problem.mark, problem.what))
    errors = [
        PlanError(problem.what, where=f"{source}:{problem.mark.line}:{problem.mark.column}", remedy=problem.remedy)
        for problem in ordered
    ]
    first = errors[0]
    first.others = tuple(errors[1:MAX_SHOWN])
    first.left_out = max(0, len(errors) - MAX_SHOWN)
    return first


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` was probably meant to be."""
    by_folded = {name.replace("-", "_").casefold(): name for name in known}
    close = difflib.get_close_matches(word.replace("-", "_").casefold(), by_folded, n=1, cutoff=0.6)
    return by_folded[close[0]] if close else None
