"""Dry run: preflight, then every role's probe, on a change that lives in a temporary directory and moves nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gpuchange.checks import fingerprint
from gpuchange.engine import Engine
from gpuchange.errors import StaleError
from gpuchange.reports import Evidence, Reported, Unreachable
from gpuchange.states import Kind, Status

FIRST_PHASE = "preflight"
READ = "preflight/host"
FAILED, UNREACHABLE = 1, 4


@dataclass
class Looks:
    """What was seen: host → "phase/provider" → report body; host → sentences about what could not be seen.

    `moved`: host → what is no longer as it was reviewed (only for changes that began from a bundle).
    """

    hosts: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    problems: dict[str, list[str]] = field(default_factory=dict)
    code: int = 0
    moved: dict[str, list[str]] = field(default_factory=dict)


def before_change(engine: Engine) -> Looks:
    """Run preflight, journalled, and tell what it saw. `code` is 0 when nothing stands in the way."""
    code = engine.run(last_phase=FIRST_PHASE)
    looks = Looks()
    for host in engine.change.hosts:
        looks.hosts[host] = {step: dict(body) for step, body in engine.change.reports(host).items()}
    for (host, *_), why in _in_the_way(engine).items():
        looks.problems.setdefault(host, []).append(why)
    looks.code = code if looks.problems else 0
    looks.moved = _moved(engine, looks)
    _add_refused(engine, looks)
    return looks


def _add_refused(engine: Engine, looks: Looks) -> None:
    """A host that did not pass was read all the same: its versions are known."""
    phase, provider = READ.split("/")
    for event in engine.change.journal.events():
        read = event.body and event.direction == "do" and (event.phase, event.provider) == (phase, provider)
        if read and event.host in looks.problems and READ not in engine.change.reports(event.host):
            looks.hosts[event.host][READ] = dict(engine.change.journal.body(event.body))


def still_as_reviewed(engine: Engine) -> None:
    """Raises StaleError when a host of a reviewed change, of which nothing is changed yet, is not as it was reviewed.

    A change taken up again is looked at anew: what preflight saw may be long ago.
    """
    change = engine.change
    if not change.reviewed or change.state.counts.touched:
        return
    looks = before_change(engine)
    _refuse_if_moved(looks.moved)
    if sum(event.kind is Kind.CONTROLLER for event in change.journal.events()) > 1:
        _refuse_if_moved(_moved(engine, _fresh(engine)))


def _fresh(engine: Engine) -> Looks:
    hosts = tuple(host for host in engine.change.hosts if host in engine.change.reviewed)
    looks = Looks(hosts={host: {} for host in hosts})
    for step in engine.change.state.table.steps[: engine.change.state.table.barrier]:
        for evidence in engine.probe(step, hosts):
            _note(looks, f"{step.phase.name}/{step.provider}", evidence)
    return looks


def _refuse_if_moved(moved: dict[str, list[str]]) -> None:
    """Raises StaleError that says of each host what moved."""
    if moved:
        lines = [f"host {host}: {line}" for host, said in moved.items() for line in said]
        raise StaleError(
            "not as reviewed; nothing was changed",
            why="\n  ".join(lines),
            remedy="look again and have that reviewed: gpuchange plan -o FILE PLAN",
        )


def _moved(engine: Engine, looks: Looks) -> dict[str, list[str]]:
    """From fresh reports, and from what was held for it: host → what moved since the review."""
    found: dict[str, list[str]] = {}
    for host, was in engine.change.reviewed.items():
        now = fingerprint.of_reports(looks.hosts.get(host, {}), FIRST_PHASE)
        said = [*fingerprint.moved(was, now), *_held_for_it(engine, host)]
        if said:
            found[host] = list(dict.fromkeys(said))
    return found


def _held_for_it(engine: Engine, host: str) -> list[str]:
    if not engine.change.state.hosts[host].held:
        return []
    held = [e for e in engine.change.journal.events() if e.host == host and e.kind is Kind.HELD]
    return list(held[-1].data.get("moved", ())) if held else []


def _in_the_way(engine: Engine) -> dict[tuple[str, str, str], str]:
    """(host, phase, provider) → why it does not go on now; what an earlier run saw and this one did not is gone."""
    hosts = engine.change.state.hosts
    return {
        (event.host, event.phase, event.provider): str(event.data.get("why", ""))
        for event in engine.change.journal.events()
        if event.kind in (Kind.REJECTED, Kind.HELD)
        and hosts[event.host].steps[event.phase, event.provider].status in (Status.FAILED, Status.HELD)
    }


def look(engine: Engine) -> Looks:
    """Preflight and every other step's probe, over all hosts that passed preflight. Journals only preflight."""
    looks = before_change(engine)
    for step in engine.change.state.table.steps:
        if step.phase.name == FIRST_PHASE or step.phase.brings_back:
            continue
        hosts = tuple(host for host in engine.change.hosts if _passed(engine, host))
        for evidence in engine.probe(step, hosts) if hosts else ():
            _note(looks, f"{step.phase.name}/{step.provider}", evidence)
    return looks


def _note(looks: Looks, step: str, evidence: Evidence) -> None:
    if isinstance(evidence, Reported):
        looks.hosts[evidence.host][step] = evidence.report
        return
    looks.problems.setdefault(evidence.host, []).append(f"{step}: {evidence.why}")
    looks.code = looks.code or (UNREACHABLE if isinstance(evidence, Unreachable) else FAILED)


def _passed(engine: Engine, host: str) -> bool:
    steps = engine.change.state.hosts[host].steps
    return all(found.status == Status.DONE for (phase, _), found in steps.items() if phase == FIRST_PHASE)
