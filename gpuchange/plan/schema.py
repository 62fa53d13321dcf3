"""The plan as JSON Schema (draft-07), for editors and for `gpuchange schema`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpuchange import providers
from gpuchange.plan.models import SECTIONS, document
from gpuchange.providers.types import UNIT, written

Schema = dict[str, Any]
_SHORT = {row.key: row.short for row in SECTIONS if row.short} | {"rollback": "on_failure"}


def json_schema() -> Schema:
    """A JSON Schema of plans over all registered providers."""
    made = document(providers.PROVIDERS).model_json_schema(by_alias=True, ref_template="#/definitions/{model}")
    made["definitions"] = made.pop("$defs", {})
    _short_forms(made)
    schema: Schema = _walk(made)
    schema["properties"]["version"] = {"const": 1, "description": "Version of the plan format: 1."}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "gpuchange plan",
        **_without(schema, "title"),
    }


def _short_forms(schema: Schema) -> None:
    """Sections that may be written as one scalar."""
    properties = schema["properties"]
    for key, field in _SHORT.items():
        if key in properties:
            scalar = schema["definitions"][_name(properties[key])]["properties"][field]
            properties[key] = _either(properties[key], scalar)


def _name(schema: Schema) -> str:
    reference: str = schema.get("$ref") or schema["allOf"][0]["$ref"]
    return reference.rsplit("/", 1)[1]


def _either(full: Schema, scalar: Schema) -> Schema:
    outside: Schema = {key: full[key] for key in ("description", "default") if key in full}
    return {**outside, "anyOf": [_without(full, *outside), _without(scalar, "default", "title")]}


def _without(schema: Schema, *keys: str) -> Schema:
    return {key: value for key, value in schema.items() if key not in keys}


def _walk(node: Any) -> Any:
    if isinstance(node, list):
        return [_walk(item) for item in node]
    if not isinstance(node, dict):
        return node
    for step in _STEPS:
        node = step(node)
    return {key: _walk(value) for key, value in node.items()}


def _readable_default(node: Schema) -> Schema:
    """Defaults are written as a plan writes them, or left out where they are whole mappings."""
    unit, default = node.get(UNIT), node.get("default")
    if unit and isinstance(default, int | float):
        node = {**node, "default": written(default, unit)}
    return _without(node, UNIT, *(["default"] if isinstance(default, dict | list) or default is None else []))


def _draft_07(node: Schema) -> Schema:
    """Beside a $ref, draft-07 ignores everything; `discriminator` is OpenAPI's."""
    node = _without(node, "discriminator")
    if "$ref" in node and len(node) > 1:
        return {**_without(node, "$ref"), "allOf": [{"$ref": node["$ref"]}]}
    return node


def _no_null(node: Schema) -> Schema:
    """A key without a value is refused: what may be left out need not be null."""
    if {"type": "null"} not in node.get("anyOf", ()):
        return node
    rest = [option for option in node["anyOf"] if option != {"type": "null"}]
    return (
        {**rest[0], **_without(node, "anyOf")} if len(rest) == 1 and "$ref" not in rest[0] else {**node, "anyOf": rest}
    )


_STEPS: tuple[Callable[[Schema], Schema], ...] = (_no_null, _readable_default, _draft_07)
