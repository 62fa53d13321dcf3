"""The plan reference as MyST text, made from the plan's JSON Schema. Run it to write plan-reference.md anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpuchange import plan

INTRO = """# Plan reference

Made from `gpuchange schema`. A plan is one YAML file; `gpuchange init` writes a commented one. Unknown keys are
errors. Versions stand in quotes, times and sizes carry a unit (`90s`, `5m`, `2GiB`).
"""


def plan_reference() -> str:
    """One section a top-level key; providers of a section each with their own table."""
    schema = plan.json_schema()
    needed = set(schema["required"])
    parts = [INTRO]
    for key, found in schema["properties"].items():
        parts += [f"## {key}\n", "Required.\n" if key in needed else "", *_section(found, schema)]
    return "\n".join(part for part in parts if part)


def _section(found: dict[str, Any], schema: dict[str, Any]) -> Iterator[str]:
    models = list(_models(found, schema))
    yield _words(found) + "\n"
    if not models:
        yield f"{_type(found, schema)}{_default(found)}\n"
    for model in models:
        tag = model.get("properties", {}).get("provider", {}).get("const")
        if tag:
            yield f"### {tag}\n\n{_words(model)}\n"
        yield _table(model, schema)


def _models(found: Any, schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The objects that may stand here, through references, alternatives and lists."""
    if not isinstance(found, dict):
        return
    if "$ref" in found:
        yield from _models(_target(found, schema), schema)
    elif "properties" in found:
        yield found
    else:
        for way in ("allOf", "anyOf", "oneOf"):
            for inner in found.get(way, ()):
                yield from _models(inner, schema)
        yield from _models(found.get("items"), schema)


def _target(found: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    target: dict[str, Any] = schema["definitions"][found["$ref"].rpartition("/")[2]]
    return target


def _table(model: dict[str, Any], schema: dict[str, Any]) -> str:
    needed = set(model.get("required", ()))
    rows = ["| key | is | default | meaning |", "|---|---|---|---|"]
    for key, found in model["properties"].items():
        default = "required" if key in needed else _default(found).removeprefix(", default ")
        rows.append(f"| `{key}` | {_type(found, schema)} | {default} | {_words(found)} |".replace("\n", " "))
    return "\n".join(rows) + "\n"


def _words(found: dict[str, Any]) -> str:
    return str(found.get("description", "")).replace("|", "\\|")


def _default(found: dict[str, Any]) -> str:
    default = found.get("default")
    return "" if default in (None, [], {}) else f", default `{default}`"


def _type(found: dict[str, Any], schema: dict[str, Any]) -> str:
    if "$ref" in found:
        return _type(_target(found, schema), schema)
    if "const" in found:
        return f"`{found['const']}`"
    if "enum" in found:
        return " or ".join(f"`{value}`" for value in found["enum"])
    for way in ("allOf", "anyOf", "oneOf"):
        if way in found:
            kinds = dict.fromkeys(_type(inner, schema) for inner in found[way] if inner.get("type") != "null")
            return " or ".join(kinds)
    if found.get("type") == "array":
        return f"list of {_type(found.get('items', {}), schema)}"
    example = f" such as `{found['examples'][0]}`" if found.get("examples") else ""
    return {"string": "text", "integer": "number", "object": "mapping"}.get(found.get("type", ""), "value") + example


if __name__ == "__main__":
    Path(__file__).with_name("plan-reference.md").write_text(plan_reference(), encoding="utf-8")
