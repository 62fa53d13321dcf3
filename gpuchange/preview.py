"""What a change would do to each host, from what a dry run saw. Pure: reports in, a Preview out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from gpuchange.checks.snapshot import parse
from gpuchange.phase import Irreversible, Phase
from gpuchange.providers.contract import HostView, Provider

Reports = Mapping[str, Mapping[str, Any]]
"""The report bodies of one host: "phase/provider" → body."""

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
    """One host. `downtime_s` is the estimate from drain to release; `problems` would stop the change."""

    host: str
    versions: tuple[Version, ...]
    steps: tuple[StepPreview, ...]
    problems: tuple[str, ...]
    as_wanted: bool
    downtime_s: float

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


Row = tuple[Phase, Provider]


def build(
    plan: Mapping[str, Any],
    rows: Sequence[Row],
    looks: Mapping[str, Reports],
    problems: Mapping[str, Sequence[str]],
    at_once: int,
) -> Preview:
    """`plan` is the plan as JSON data, `rows` its steps in order, `looks` and `problems` what the dry run saw."""
    hosts = tuple(_host(plan, rows, host, looks.get(host, {}), problems.get(host, ())) for host in (looks | problems))
    return Preview(str(plan.get("name", "")), hosts, at_once)


def _host(
    plan: Mapping[str, Any], rows: Sequence[Row], host: str, reports: Reports, problems: Sequence[str]
) -> HostPreview:
    as_wanted = _as_wanted(reports)
    steps = tuple(_step(plan, row, host, reports) for row in rows)
    return HostPreview(
        host=host,
        versions=versions(plan, reports.get("record/host", {})),
        steps=steps,
        problems=tuple(problems),
        as_wanted=as_wanted,
        downtime_s=0.0 if as_wanted else downtime(rows),
    )


def _as_wanted(reports: Reports) -> bool:
    """Whether preflight found the host as the plan wants it: one says so and none denies it."""
    said = [body["as_wanted"] for key, body in reports.items() if key.startswith("preflight/") and "as_wanted" in body]
    return bool(said) and all(said)


def _step(plan: Mapping[str, Any], row: Row, host: str, reports: Reports) -> StepPreview:
    phase, provider = row
    reversible = phase.undo.why if isinstance(phase.undo, Irreversible) else provider.reversible
    body = reports.get(f"{phase.name}/{provider.name}")
    lines = _lines(plan, provider, host, reports, body) if body is not None else ()
    return StepPreview(phase.name, provider.name, lines, reversible, provider.estimate_s)


def _lines(
    plan: Mapping[str, Any], provider: Provider, host: str, reports: Reports, body: Mapping[str, Any]
) -> tuple[str, ...]:
    view = HostView(host, plan, params_of(plan, provider), first=reports, last=reports, own=body)
    try:
        return tuple(provider.preview(view, provider.report.model_validate(body)))
    except ValidationError as error:
        return (f"its report cannot be read: {error.errors()[0]['msg']}",)


def params_of(plan: Mapping[str, Any], provider: Provider) -> Mapping[str, Any]:
    """The provider's parameters in the plan; empty if the plan leaves them to the defaults."""
    part = plan.get(provider.phase)
    for entry in part if isinstance(part, list | tuple) else (part,):
        if isinstance(entry, Mapping) and isinstance(entry.get(provider.name), Mapping):
            return entry[provider.name]  # type: ignore[no-any-return]
    return {}


def downtime(rows: Sequence[Row]) -> float:
    """Estimated seconds out of service: every step from the one that takes the host out to the one that brings it back."""
    total, out = 0.0, False
    for phase, provider in rows:
        out = out or phase.takes_out
        total += provider.estimate_s if out else 0.0
        if phase.brings_back:
            out = False
    return total


def versions(plan: Mapping[str, Any], record: Mapping[str, Any]) -> tuple[Version, ...]:
    """What the host has and the plan wants, for each component that either names. `record` is a record/host body."""
    wanted, found = wanted_versions(plan), found_versions(record)
    rows = (Version(name, found.get(name, ""), wanted.get(name, "")) for name in COMPONENTS)
    return tuple(row for row in rows if row.before or row.after)


def wanted_versions(plan: Mapping[str, Any]) -> dict[str, str]:
    """component → version that the plan asks for."""
    wanted: dict[str, str] = {}
    part = plan.get("stack") or {}
    for entry in part if isinstance(part, list | tuple) else (part,):
        for params in (entry, *entry.values()):
            if isinstance(params, Mapping):
                wanted |= {name: str(params[name]) for name in COMPONENTS if isinstance(params.get(name), str)}
    return wanted


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


def same_version(found: str, wanted: str) -> bool:
    """Whether `found` is `wanted`, or a finer form of it (12.8.93 is 12.8; 9.1.0.70-1 is 9.1.0)."""
    if not found.startswith(wanted):
        return False
    rest = found[len(wanted) :]
    return not rest or not rest[0].isdigit()
