"""The plan file: read, checked, explained. Data only: nothing in it is templated or run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gpuchange import providers
from gpuchange.errors import PlanError
from gpuchange.plan import clear, faults, rules
from gpuchange.plan.models import Chosen, Plan, Rollback, Rollout, document
from gpuchange.plan.problems import Mark, Problem, ProblemsFound, plan_error
from gpuchange.plan.schema import json_schema
from gpuchange.plan.template import template
from gpuchange.plan.yamlpos import MAX_BYTES, Document, dotted, parse

__all__ = ["Chosen", "Plan", "Rollback", "Rollout", "from_data", "json_schema", "load", "loads", "template"]


def load(path: str | Path) -> Plan:
    """Read and check the plan file at `path`. Raises PlanError, which names every fault with file:line:column."""
    if Path(path).exists() and not (Path(path).is_file() or Path(path).is_dir()):
        remedy = "save it in a file first: it is read more than once, and kept with the change"
        raise PlanError("a plan is a file, not a pipe or a device", where=str(path), remedy=remedy)
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise PlanError("the plan cannot be read", where=str(path), why=why, remedy="name a plan file") from None
    return loads(content, str(path))


def loads(text: str | bytes, source: str) -> Plan:
    """Check a plan given as YAML text. `source` is the name that errors show. Raises PlanError."""
    try:
        content = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
        return _checked(parse(content), source)
    except ProblemsFound as found:
        raise plan_error(found.problems, source) from None


def from_data(data: Mapping[str, Any], source: str = "") -> Plan:
    """A plan from its own JSON data (`Plan.data`). Raises PlanError if this gpuchange would not have written it."""
    model = document(providers.PROVIDERS)
    try:
        plan = model.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = dotted(tuple(first["loc"]))
        remedy = "use the gpuchange version that wrote it"
        raise PlanError(f"the stored plan does not fit: {where}: {first['msg']}", where=source, remedy=remedy) from None
    plan._source = source
    return plan


def _checked(found: Document, source: str) -> Plan:
    model = document(providers.PROVIDERS)
    if not isinstance(found.data, dict):
        what = "the plan is not a mapping of keys"
        raise ProblemsFound([*found.problems, Problem(Mark(1, 1), what, "begin with: version: 1")])
    try:
        plan = model.model_validate(found.data)
    except ValidationError as error:
        others = [*found.problems, *faults.problems(error, found, model)]
        raise ProblemsFound(clear.without_echoes(others, clear.secrets(found))) from None
    plan._source = source
    later = clear.without_echoes([*found.problems, *_later_faults(plan, found)], clear.secrets(found))
    if later:
        raise ProblemsFound(later)
    return plan


def _later_faults(plan: Plan, found: Document) -> Iterator[Problem]:
    data = plan.data
    yield from faults.misread_numbers(found.data, data, (), found)
    for path, what, remedy in rules.broken(data):
        where = next(found.values[path[:end]] for end in range(len(path), -1, -1) if path[:end] in found.values)
        yield Problem(where, f"{dotted(path)}: {what}", remedy)
