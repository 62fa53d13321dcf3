"""What a change measured on each host before and after, read back from its journal."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from gpuchange.checks.benchmark import METRICS, Finding
from gpuchange.cli.changes import JOURNAL, Change
from gpuchange.errors import GpuchangeError
from gpuchange.journal import Journal
from gpuchange.states import Kind

STEPS = ("baseline/gpu", "verify/gpu")
JUDGED = frozenset({Kind.ACCEPTED, Kind.REJECTED})
HEAD = ("host", "card", "metric", "before", "after", "change")


def speeds(found: Change) -> dict[str, list[Finding]]:
    """host → its metrics, the last measurement of each side; hosts that were not measured afterwards are left out."""
    kept = {host: bodies for host, bodies in _bodies(found).items() if STEPS[1] in bodies}
    if not kept:
        return {}
    from gpuchange.plan import load  # slow to import, and most reports do without

    try:
        plan = load(found.directory / "frozen" / "plan.yaml")
    except GpuchangeError:
        return {}
    params = next((row.params for row in plan.chosen("verify") if row.provider.name == "gpu"), {})
    rows = {host: _findings(plan.data, dict(params), bodies) for host, bodies in kept.items()}
    return {host: findings for host, findings in rows.items() if findings}


def rows(found: dict[str, list[Finding]]) -> tuple[tuple[str, ...], ...]:
    """The same as cells of a table."""
    return tuple((host, *_cells(finding)) for host, findings in found.items() for finding in findings)


def _cells(row: Finding) -> tuple[str, ...]:
    meaning = METRICS.get(row.metric)
    title, unit = (meaning.title, f" {meaning.unit}") if meaning else (row.metric, "")
    numbers = (f"{value:.6g}{unit}" if value is not None else "-" for value in (row.before, row.after))
    change = f"{row.change_percent:+.1f}%" if row.change_percent is not None else "-"
    return (row.card, title, *numbers, change if row.ok else f"{change}, failed")


def _bodies(found: Change) -> dict[str, dict[str, dict[str, Any]]]:
    digests = {
        (e.host, f"{e.phase}/{e.provider}"): e.body
        for e in found.events
        if e.body and e.kind in JUDGED and e.direction == "do" and f"{e.phase}/{e.provider}" in STEPS
    }
    kept: dict[str, dict[str, dict[str, Any]]] = {}
    with Journal.open(found.directory / JOURNAL, readonly=True) as journal:
        for (host, step), digest in digests.items():
            kept.setdefault(host, {})[step] = dict(journal.body(digest))
    return kept


def _findings(plan: dict[str, Any], params: dict[str, Any], bodies: dict[str, dict[str, Any]]) -> list[Finding]:
    from gpuchange.providers.measured import MeasureReport
    from gpuchange.providers.verify.gpu import compared

    try:
        return compared(plan, params, bodies.get(STEPS[0], {}), MeasureReport.model_validate(bodies[STEPS[1]]))
    except ValidationError:
        return []  # written by another version, whose reports had another shape
