"""The shape of a provider: one way to do a phase. One parameter model, one report model, one role of the same stem."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from gpuchange.reports import Report, Verdict, by_state

Mode = Literal["probe", "apply", "undo"]


class Params(BaseModel):
    """Base of a provider's parameters in the plan. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True)
class HostView:
    """All that a provider may know about one host when it builds arguments or judges. Plain data.

    `plan` is the whole plan as JSON data; `params` this provider's part of it. `first` and `last` map
    "phase/provider" to the first and the latest accepted report body of this host in this change; `own` is
    this step's first report of any verdict (state found before the first action). `waited` is the seconds this
    step has been answered with `again`; `retries` how often an operator has said to try it again in this direction.
    `memo` is what the last `again` of this step and direction wanted to be remembered; `confirmed`: an operator has
    done what it asked for.
    """

    host: str
    plan: Mapping[str, Any]
    params: Mapping[str, Any]
    first: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    last: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    own: Mapping[str, Any] | None = None
    waited: float = 0.0
    retries: int = 0
    memo: Mapping[str, Any] = field(default_factory=dict)
    confirmed: bool = False
    direction: Literal["do", "undo"] = "do"


def no_args(_view: HostView, _mode: Mode) -> dict[str, Any]:
    return {}


def no_delegates(_params: Mapping[str, Any]) -> tuple[str, ...]:
    return ()


def no_moves(_view: HostView) -> Mapping[str, tuple[str, ...]]:
    return {}


def judge_state(_view: HostView, report: Any) -> Verdict:
    return by_state(report)


WARNING = "warning: "
"""Begins a line of a preview that does not stop the change but must be seen before a yes."""


@dataclass(frozen=True)
class Provider:
    """One row. `args` builds the JSON for the role's module call; `judge`/`judge_undo` are pure.

    `reversible`: "yes", "no: why". `foresees`: its preview needs no report of its own, only the plan and preflight's.
    `may_change`: what of the host's identity this provider may move (gpu_uuid, serial, address, host_key,
    device_names); `moves` says in which slots: slot → what of its card. `delegates`: inventory patterns of the other
    machines it acts on. `root_for`: what its plays need root for, `root_on`: on which machines.
    `collections`/`binaries` are asked for by preflight; `also`: programs that its parameters need besides.
    """

    phase: str
    name: str
    does: str
    params: type[Params]
    report: type[Report]
    args: Callable[[HostView, Mode], dict[str, Any]] = no_args
    judge: Callable[[HostView, Any], Verdict] = judge_state
    judge_undo: Callable[[HostView, Any], Verdict] = judge_state
    preview: Callable[[HostView, Any], tuple[str, ...]] = lambda _view, _report: ()
    foresees: bool = False
    reversible: str = "yes"
    may_change: tuple[str, ...] = ()
    moves: Callable[[HostView], Mapping[str, tuple[str, ...]]] = no_moves
    delegates: Callable[[Mapping[str, Any]], tuple[str, ...]] = no_delegates
    root_for: str = ""
    root_on: str = "host"
    collections: tuple[str, ...] = ()
    binaries: tuple[str, ...] = ()
    also: Callable[[Mapping[str, Any]], tuple[str, ...]] = no_delegates
    estimate_s: float = 5.0

    @property
    def role(self) -> str:
        return f"{self.phase}_{self.name}"
