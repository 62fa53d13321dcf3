"""What pydantic found wrong, said in an operator's words and put where it stands in the file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from gpuchange import providers
from gpuchange.plan.models import SECTIONS
from gpuchange.plan.problems import Mark, Path, Problem, nearest
from gpuchange.plan.yamlpos import Document, dotted
from gpuchange.providers.types import Plain, looks_like_number

Said = tuple[str, str]


def problems(error: ValidationError, document: Document, model: type[BaseModel]) -> Iterator[Problem]:
    """One Problem per error of pydantic, but none for keys that `document` has found faulty already."""
    known = {problem.path for problem in document.problems if problem.path is not None}
    located = [(detail, *locate(detail["loc"], document.data)) for detail in error.errors(include_url=False)]
    keys = [path + rest for detail, path, rest in located if detail["type"] in ("literal_error", "missing")]
    strange = [key[:-1] for key in keys if key[-1:] == ("provider",)]
    for detail, path, rest in located:
        echo = detail["type"] == "too_short" and bool(detail["input"])  # its entries were refused one by one
        if (path + rest)[-1:] != ("provider",):
            echo |= any(path[: len(entry)] == entry for entry in strange)  # measured by the wrong model
        if not echo and not any(path[: len(bad)] == bad for bad in known):
            what, remedy = _say(detail, path, rest, document, model)
            yield Problem(_mark(detail, path, rest, document), what, remedy, path)


def locate(loc: tuple[int | str, ...], data: Any) -> tuple[Path, Path]:
    """Split pydantic's location into the path that exists in `data` and the last key, if that is missing there.

    Parts that are no keys (the tag of a union's member, the index of a short form) are dropped.
    """
    path: Path = ()
    for index, part in enumerate(loc):
        if _holds(data, part):
            path, data = (*path, part), data[part]
        elif index == len(loc) - 1 and isinstance(part, str) and isinstance(data, Mapping):
            return path, (part,)
    return path, ()


def _holds(data: Any, part: int | str) -> bool:
    if isinstance(part, int):
        return isinstance(data, list) and part < len(data)
    return isinstance(data, Mapping) and part in data


def _mark(detail: ErrorDetails, path: Path, rest: Path, document: Document) -> Mark:
    if detail["type"] == "extra_forbidden":
        return document.keys.get(path + rest, Mark(1, 1))
    if detail["type"] == "union_tag_invalid":
        return document.values.get((*path, "provider"), Mark(1, 1))
    return document.values.get(path, Mark(1, 1))


def _say(detail: ErrorDetails, path: Path, rest: Path, document: Document, model: type[BaseModel]) -> Said:
    """What and remedy of one error."""
    context = detail.get("ctx", {})
    special: dict[str, Callable[[], Said]] = {
        "missing": lambda: _missing(path, rest, model, detail["loc"]),
        "extra_forbidden": lambda: _unknown_key(detail["loc"], path + rest, model),
        "union_tag_invalid": lambda: _unknown_provider(context["tag"], context["expected_tags"], path),
        "union_tag_not_found": lambda: (f"{dotted(path)}.provider is missing", "say which: provider: NAME"),
    }
    if detail["type"] == "literal_error" and path[-1:] == ("provider",):
        return _unknown_provider(str(detail["input"]), context["expected"], path[:-1])
    if detail["type"] == "missing" and rest == ("provider",):
        return special["union_tag_not_found"]()
    if detail["type"] in special:
        return special[detail["type"]]()
    name = dotted(path + rest) or "the plan"
    what, remedy = _general(detail, document, path)
    return f"{name}: {what}", remedy


def _general(detail: ErrorDetails, document: Document, path: Path) -> Said:
    context = detail.get("ctx", {})
    kind, value = detail["type"], detail["input"]
    if kind == "refused":
        return str(context["what"]), str(context["remedy"]) or "write another value"
    if kind == "literal_error":
        return _not_among(value, str(context["expected"]))
    if kind in _SHAPES:
        return f"{_shape(value)} where {_SHAPES[kind][0]} belongs", _SHAPES[kind][1]
    if kind in ("too_short", "string_too_short"):
        return "is empty", "name at least one"
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return message[:1].lower() + message[1:], _REMEDIES.get(kind, "write another value")


_MAPPING = ("a mapping", "write `key: value` lines below it, indented")
_LIST = ("a list", "write one entry per line, each beginning with `- `, or [a, b]")
_NUMBER = ("a whole number", "write digits only: 3")
_TEXT = ("text", "write text; in quotes if it holds : or #")
_TRUTH = ("true or false", "write true or false")
_SHAPES: dict[str, tuple[str, str]] = {
    "model_type": _MAPPING,
    "model_attributes_type": _MAPPING,
    "dict_type": _MAPPING,
    "tuple_type": _LIST,
    "list_type": _LIST,
    "int_parsing": _NUMBER,
    "int_type": _NUMBER,
    "int_from_float": _NUMBER,
    "int_parsing_size": _NUMBER,
    "float_parsing": ("a number", "write a number: 0.5"),
    "float_type": ("a number", "write a number: 0.5"),
    "string_type": _TEXT,
    "bool_parsing": _TRUTH,
    "bool_type": _TRUTH,
}
_REMEDIES = {
    "greater_than_equal": "write a larger number",
    "greater_than": "write a larger number",
    "less_than_equal": "write a smaller number",
    "less_than": "write a smaller number",
}


def _shape(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    return repr(str(value)[:80])


def _not_among(value: Any, expected: str) -> Said:
    words = [word.strip("'") for word in expected.replace(" or ", ", ").split(", ")]
    close = nearest(value, words) if isinstance(value, str) else None
    meant = f" (did you mean {close}?)" if close else ""
    return f"{_shape(value)} is not known{meant}", f"write {_either(words)}"


def _either(words: list[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _unknown_provider(name: str, expected: str, path: Path) -> Said:
    what, remedy = _not_among(name, expected)
    if "did you mean" not in what:
        remedy = _belongs(name) or remedy
    return f"{dotted(path)}.provider: {what}", remedy


def _belongs(name: str) -> str:
    """Where a provider that was looked for in the wrong place is at home."""
    own = next((row.key for row in SECTIONS if row.kind == "one" and row.key == name), None)
    if own:
        return f"it is a key of its own: {own}:"
    home = next((row.phase for row in providers.PROVIDERS if row.name == name), None)
    return f"it belongs below {home}:" if home else ""


def _missing(path: Path, rest: Path, model: type[BaseModel], loc: tuple[int | str, ...]) -> Said:
    key = str(rest[-1]) if rest else "a key"
    fields = [field for owner in models_at(loc[:-1], model) for name, field in _fields(owner).items() if name == key]
    says = next((field.description for field in fields if field.description), "")
    hint = f" ({says.rstrip('.')})" if says else ""
    return f"{dotted(path + rest)} is missing", f"add `{key}:`{hint}"


def _unknown_key(loc: tuple[int | str, ...], path: Path, model: type[BaseModel]) -> Said:
    key = str(loc[-1])
    known = sorted({name for owner in models_at(loc[:-1], model) for name in _fields(owner)})
    close = nearest(key, known)
    where = dotted(path[:-1]) or "the plan"
    if close and path != ("release",):
        return f"unknown key {key} in {where} (did you mean {close}?)", f"write {close}:, or remove the key"
    if path == ("release",):
        return "unknown key release in the plan", "remove it: release has no settings, it takes back what drain did"
    home = next((row.key for row in SECTIONS if key in _section_keys(row.key, model)), None)
    if home and len(path) == 1:
        return f"unknown key {key} in {where}", f"it belongs below {home}:"
    return f"unknown key {key} in {where}", f"remove it; known here: {', '.join(known)}"


def _section_keys(section: str, model: type[BaseModel]) -> set[str]:
    field = model.model_fields.get(section)
    return {name for owner in _models(field.annotation) for name in _fields(owner)} if field else set()


def models_at(loc: tuple[int | str, ...], model: type[BaseModel]) -> list[type[BaseModel]]:
    """The models that may stand at `loc`; the tag of a union picks one."""
    found = [model]
    for part in loc:
        below = [
            inner for owner in found if part in _fields(owner) for inner in _models(_fields(owner)[part].annotation)
        ]
        tagged = [owner for owner in found if _tag(owner) == part]
        found = below or tagged or found
    return found


def _fields(model: type[BaseModel]) -> dict[Any, Any]:
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _tag(model: type[BaseModel]) -> str | None:
    field = model.model_fields.get("provider")
    values = get_args(field.annotation) if field and get_origin(field.annotation) is Literal else ()
    return values[0] if values else None


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) if inner is not annotation for model in _models(inner)]


def misread_numbers(raw: Any, read: Any, path: Path, document: Document) -> Iterator[Problem]:
    """Numbers that pydantic read from text which other readers take for another number (0777, 1_000)."""
    if isinstance(raw, dict) and isinstance(read, dict):
        for key in raw.keys() & read.keys():
            yield from misread_numbers(raw[key], read[key], (*path, key), document)
    elif isinstance(raw, list) and isinstance(read, list):
        for index, pair in enumerate(zip(raw, read, strict=False)):
            yield from misread_numbers(*pair, (*path, index), document)
    elif isinstance(raw, Plain) and isinstance(read, int | float) and _ambiguous(raw):
        what = f"{dotted(path)}: {raw} can be read as more than one number"
        yield Problem(document.values.get(path, Mark(1, 1)), what, "write it in plain decimal digits", path)


def _ambiguous(text: str) -> bool:
    digits = text.lstrip("+-")
    return looks_like_number(text) and ("_" in text or (digits.startswith("0") and digits.isdigit() and digits != "0"))
