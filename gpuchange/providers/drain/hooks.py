"""drain/hooks: the plan's own commands before drain and after release, each once a direction."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from gpuchange.providers.contract import HostView, Mode, Params, Provider
from gpuchange.providers.types import Argv, Duration
from gpuchange.reports import Report, Verdict, by_state


class Hook(BaseModel):
    """One command: a list of words, no shell. Must be idempotent: after a crash it may run again."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    command: Argv = Field(description="Program and arguments, as a list.")
    on: Literal["controller", "host"] = Field("controller", description="Where it runs.")
    timeout: Duration = Field(60, description="How long it may take; then it is ended and counts as failed.")


class HooksParams(Params):
    """Commands before drain and after release; one that fails, fails the step."""

    before_drain: tuple[Hook, ...] = Field((), description="Run before the host leaves service.")
    after_release: tuple[Hook, ...] = Field((), description="Run once the host is back in service.")


class Ended(BaseModel):
    """A command and how it ended; `rc` is None while it has not."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    command: tuple[str, ...]
    rc: int | None = None
    out: str = ""


class Group(BaseModel):
    """What one machine reports of its commands."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    on: str
    hooks: tuple[Ended, ...] = ()


class HooksReport(Report):
    parts: tuple[Group, ...] = ()


def groups(hooks: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbours that run on the same machine, in the plan's order; one empty group if there is nothing to do."""
    found = [
        {"on": where, "hooks": [{"command": list(row["command"]), "timeout": row.get("timeout", 60)} for row in rows]}
        for where, rows in groupby(hooks, key=lambda row: row.get("on", "controller"))
    ]
    return found or [{"on": "host", "hooks": []}]


def args(view: HostView, _mode: Mode) -> dict[str, Any]:
    key = "after_release" if view.direction == "undo" else "before_drain"
    return {"groups": groups(view.params.get(key) or ()), "host": view.host}


def judge(_view: HostView, report: HooksReport) -> Verdict:
    if report.state == "running":
        return Verdict.again(1.0, report.why)
    if report.state != "done":
        return by_state(report)
    return Verdict.accept(findings=tuple(_said(part.on, hook) for part in report.parts for hook in part.hooks))


def _said(where: str, hook: Ended) -> str:
    last = hook.out.strip().splitlines()[-1:] or ["ended with 0"]
    return f"{where}: {' '.join(hook.command)}: {last[0]}"


def preview(view: HostView, _report: HooksReport) -> tuple[str, ...]:
    """The commands of both directions, in order."""
    return tuple(
        f"{words} on the {row.get('on', 'controller')}: {' '.join(row['command'])}"
        for key, words in (("before_drain", "before drain"), ("after_release", "after release"))
        for row in view.params.get(key) or ()
    )


PROVIDER = Provider(
    phase="drain",
    name="hooks",
    does="Run the plan's commands before drain and after release.",
    params=HooksParams,
    report=HooksReport,
    root_for="the owner marker; commands `on: host` run as root",
    args=args,
    judge=judge,
    judge_undo=judge,
    preview=preview,
    foresees=True,
    estimate_s=2.0,
)
