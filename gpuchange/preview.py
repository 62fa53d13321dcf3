"""What a change would do to each host, from what a dry run saw. Pure: reports in, a Preview out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from gpuchange.checks.snapshot import parse
from gpuchange.phase import Irreversible, Phase
from gpuchange.plan import Plan
from gpuchange.providers.contract import HostView, Provider

Reports = Mapping[str, Mapping[str, Any]]
"""The report bodies of one host: "phase/provider" → body."""

NOTHING_KNOWN: Mapping[str, float] = {}
UNSEEN: Mapping[str, Any] = {"state": "unknown"}
COMPONENTS = ("driver", "cuda", "cudnn", "container_toolkit")


@dataclass(frozen=True)
class Version:
    """One component of the stack: what is there, what the plan asks for ("" = not asked for, left alone)."""

    component: str
    before: str
    after: str

    @property
    def changes(self) -> bool:
        return bool(self.after) and not same_version(self.before, self.after)


@dataclass(frozen=True)
class StepPreview:
    """One step: what it would do here, in the provider's own lines; `reversible` is "yes" or "no: why"."""

    phase: str
    provider: str
    lines: tuple[str, ...]
    reversible: str
    estimate_s: float


@dataclass(frozen=True)
class HostPreview:
    """One host. `versions` is empty where nothing could be read. `downtime_s` is the estimate from drain to release,
    `learned` whether earlier changes tell how long its longest step takes; `problems` would stop the change.
    """

    host: str
    versions: tuple[Version, ...]
    steps: tuple[StepPreview, ...]
    problems: tuple[str, ...]
    as_wanted: bool
    downtime_s: float
    learned: bool = False

    @property
    def no_return(self) -> tuple[str, ...]:
        """The steps that cannot be taken back, each with its reason."""
        return tuple(f"{s.phase}/{s.provider}: {s.reversible}" for s in self.steps if s.reversible != "yes")


@dataclass(frozen=True)
class Preview:
    """The whole change. `at_once` hosts may be out of service at the same time."""

    name: str
    hosts: tuple[HostPreview, ...]
    at_once: int

    @property
    def to_change(self) -> tuple[HostPreview, ...]:
        return tuple(host for host in self.hosts if not host.as_wanted and not host.problems)

    @property
    def problems(self) -> bool:
        return any(host.problems for host in self.hosts)


@dataclass(frozen=True)
class Row:
    """A step of the table with its provider and the provider's parameters in the plan (JSON data).

    `seconds`: how long it will take, `learned` from earlier changes or estimated.
    """

    phase: Phase
    provider: Provider
    params: Mapping[str, Any]
    seconds: float = 0.0
    learned: bool = False

    @property
    def key(self) -> str:
        return f"{self.phase.name}/{self.provider.name}"


def _as_long_as(row: Row, took: Mapping[str, float]) -> Row:
    known = row.key in took
    return replace(row, seconds=took[row.key] if known else row.provider.estimate_s, learned=known)


def rows(plan: Plan, phases: Sequence[Phase]) -> tuple[Row, ...]:
    """Every step of `plan` in order; a phase that mirrors another (release) has its providers, reversed."""
    found = []
    for phase in phases:
        chosen = plan.chosen(phase.do.phase)
        found += [Row(phase, one.provider, one.params) for one in (reversed(chosen) if phase.reverse else chosen)]
    return tuple(found)


def build(
    plan: Plan,
    phases: Sequence[Phase],
    looks: Mapping[str, Reports],
    problems: Mapping[str, Sequence[str]],
    took: Mapping[str, float] = NOTHING_KNOWN,
) -> Preview:
    """`looks` has each host's report bodies, `problems` what stands in each host's way, as the dry run saw them.

    `took`: "phase/provider" → seconds that the step took in earlier changes; else the provider's own estimate counts.
    """
    steps, data = [_as_long_as(row, took) for row in rows(plan, phases)], plan.data
    hosts = tuple(
        _host(data, steps, host, looks.get(host, {}), problems.get(host, ())) for host in {**looks, **problems}
    )
    return Preview(plan.name, hosts, plan.rollout.max_unavailable_of(len(hosts)))


def _host(
    plan: Mapping[str, Any], steps: Sequence[Row], host: str, reports: Reports, problems: Sequence[str]
) -> HostPreview:
    as_wanted = _as_wanted(reports) and not problems
    seen = reports.get("record/host") or reports.get("preflight/host", {})
    return HostPreview(
        host=host,
        versions=versions(resolved(plan, reports), seen) if seen.get("facts") or not problems else (),
        steps=tuple(_step(plan, row, host, reports) for row in steps),
        problems=tuple(problems),
        as_wanted=as_wanted,
        downtime_s=0.0 if as_wanted else downtime(steps),
        learned=any(row.learned for row in sorted(_out(steps), key=lambda row: row.provider.estimate_s)[-1:]),
    )


def _as_wanted(reports: Reports) -> bool:
    """Whether preflight found the host as the plan wants it: one provider says so and none denies it."""
    said = [body["as_wanted"] for key, body in reports.items() if key.startswith("preflight/") and "as_wanted" in body]
    return True in said and False not in said


def _step(plan: Mapping[str, Any], row: Row, host: str, reports: Reports) -> StepPreview:
    reversible = row.phase.undo.why if isinstance(row.phase.undo, Irreversible) else row.provider.reversible
    body = reports.get(row.key, UNSEEN if reports and row.provider.foresees and not row.phase.reverse else None)
    lines = _lines(plan, row, host, reports, body) if body is not None else ()
    return StepPreview(row.phase.name, row.provider.name, lines, reversible, row.seconds)


def _lines(plan: Mapping[str, Any], row: Row, host: str, reports: Reports, body: Mapping[str, Any]) -> tuple[str, ...]:
    view = HostView(host, plan, row.params, first=reports, last=reports, own=body)
    try:
        return tuple(row.provider.preview(view, row.provider.report.model_validate(body)))
    except ValidationError as error:
        return (f"its report cannot be read: {error.errors()[0]['msg']}",)


def downtime(steps: Sequence[Row]) -> float:
    """Estimated seconds out of service: every step from the phase that takes out to the one that brings back."""
    return sum(row.seconds for row in _out(steps))


def _out(steps: Sequence[Row]) -> Sequence[Row]:
    first = next((index for index, row in enumerate(steps) if row.phase.takes_out), len(steps))
    last = max((index for index, row in enumerate(steps) if row.phase.brings_back), default=len(steps) - 1)
    return steps[first : last + 1]


def versions(plan: Mapping[str, Any], record: Mapping[str, Any]) -> tuple[Version, ...]:
    """What the host has and the plan wants, for each component that either names. `record` is a body with facts."""
    return compared(wanted_versions(plan), found_versions(record))


def compared(wanted: Mapping[str, str], found: Mapping[str, str]) -> tuple[Version, ...]:
    """`found` beside `wanted` (component → version), for each component that either names."""
    rows = (Version(name, found.get(name, ""), wanted.get(name, "")) for name in COMPONENTS)
    return tuple(row for row in rows if row.before or row.after)


def resolved(plan: Mapping[str, Any], reports: Reports) -> Mapping[str, Any]:
    """The plan with the versions that it leaves open as preflight chose them for this host."""
    stack = plan.get("stack") or {}
    chosen = reports.get(f"preflight/{stack.get('provider')}", {}).get("chosen") or {}
    return {**plan, "stack": {**stack, **chosen}} if chosen else plan


def wanted_versions(plan: Mapping[str, Any]) -> dict[str, str]:
    """component → version that the plan asks for."""
    stack = plan.get("stack") or {}
    return {name: stack[name] for name in COMPONENTS if isinstance(stack.get(name), str)}


def found_versions(body: Mapping[str, Any]) -> dict[str, str]:
    """component → version found on the host ("" = absent), from a record, seal or verify report body."""
    if not body.get("facts"):
        return {}
    snap = parse(body["facts"])
    return {
        "driver": snap.driver.loaded or "",
        "cuda": snap.cuda.active or "",
        "cudnn": snap.cudnn.version or "",
        "container_toolkit": snap.container_toolkit or "",
    }


def moved(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[str, ...]:
    """For each component what became of it: "550.54.15 → 570.172.08", or its version if it did not move."""
    return tuple(_move(before.get(name, ""), after.get(name, "")) for name in COMPONENTS)


def _move(before: str, after: str) -> str:
    return (before or "-") if before == after else f"{before or 'absent'} → {after or 'absent'}"


def same_version(found: str, wanted: str) -> bool:
    """Whether `found` is `wanted`, or a finer form of it (12.8.93 is 12.8; 9.1.0.70-1 is 9.1.0)."""
    if not found.startswith(wanted):
        return False
    rest = found[len(wanted) :]
    return not rest or not rest[0].isdigit()
