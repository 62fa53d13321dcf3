"""Dry run: preflight, then every role's probe, on a change that lives in a temporary directory and moves nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gpuchange.engine import Engine
from gpuchange.reports import Evidence, Reported, Unreachable
from gpuchange.states import Kind, Status

FIRST_PHASE = "preflight"
FAILED, UNREACHABLE = 1, 4


@dataclass
class Looks:
    """What was seen: host → "phase/provider" → report body; host → sentences about what could not be seen."""

    hosts: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    problems: dict[str, list[str]] = field(default_factory=dict)
    code: int = 0


def before_change(engine: Engine) -> Looks:
    """Run preflight, journalled, and tell what it saw. `code` is 0 when nothing stands in the way."""
    code = engine.run(last_phase=FIRST_PHASE)
    looks = Looks()
    for host in engine.change.hosts:
        looks.hosts[host] = {step: dict(body) for step, body in engine.change.reports(host).items()}
    for (host, *_), why in _in_the_way(engine).items():
        looks.problems.setdefault(host, []).append(why)
    looks.code = code if looks.problems else 0
    return looks


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
