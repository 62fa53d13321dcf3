"""Dry run: preflight, then every role's probe, on a change that lives in a temporary directory and moves nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gpuchange.engine import Engine
from gpuchange.reports import Failed, Reported, Unreachable
from gpuchange.states import Kind, Status

FIRST_PHASE = "preflight"


@dataclass
class Looks:
    """What was seen: host → "phase/provider" → report body; host → sentences about what could not be seen."""

    hosts: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    problems: dict[str, list[str]] = field(default_factory=dict)
    code: int = 0


def seen(engine: Engine) -> Looks:
    """What the journal knows after `engine.run(last_phase=FIRST_PHASE)`."""
    looks = Looks(code=0)
    for host in engine.change.hosts:
        looks.hosts[host] = {step: dict(body) for step, body in engine.change.reports(host).items()}
    for event in engine.change.journal.events():
        if event.kind in (Kind.REJECTED, Kind.HELD):
            looks.problems.setdefault(event.host, []).append(str(event.data.get("why", "")))
    return looks


def look(engine: Engine) -> Looks:
    """Preflight and every other step's probe, over all hosts that passed preflight. Journals only preflight."""
    code = engine.run(last_phase=FIRST_PHASE)
    looks = seen(engine)
    looks.code = code
    state = engine.change.state
    for step in state.table.steps:
        if step.phase.name == FIRST_PHASE or step.phase.brings_back:
            continue
        hosts = tuple(host for host in engine.change.hosts if _passed(engine, host))
        for evidence in engine.probe(step, hosts) if hosts else ():
            key = f"{step.phase.name}/{step.provider}"
            if isinstance(evidence, Reported):
                looks.hosts[evidence.host][key] = evidence.report
            else:
                looks.problems.setdefault(evidence.host, []).append(f"{key}: {evidence.why}")
                looks.code = looks.code or (4 if isinstance(evidence, Unreachable) else isinstance(evidence, Failed))
    return looks


def _passed(engine: Engine, host: str) -> bool:
    steps = engine.change.state.hosts[host].steps
    return all(found.status == Status.DONE for (phase, _), found in steps.items() if phase == FIRST_PHASE)
