"""Scalar types that plan parameters are made of.

A plan's scalars reach these types as text. Values that are already converted (a frozen plan's JSON, a default) pass
through unchanged, so a model can be validated again from its own JSON form:

    Duration   whole seconds (int)      written 90s, 5m, 2h, 1d, 1h30m
    Size       bytes (int)              written 512MiB, 2GiB, 1TB
    Percent    percent points (float)   written 5%
    Count      whole number (int)       written 3
    Number     number (float)           written 3 or 0.5
    Version    text                     written in quotes
    VersionOrAuto  text                 written in quotes, or auto
    AbsPath, UnitName, HostPattern, Name, Text, Word   text, checked
    Argv       a command as a list of words; no shell

`OneOrMany()` marks a tuple whose only entry may stand without a list.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, NoReturn

from pydantic import AfterValidator, BeforeValidator, GetCoreSchemaHandler, GetJsonSchemaHandler, WithJsonSchema
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

OPEN = "auto"
"""What a plan writes for a version that preflight shall choose."""

UNIT = "x-unit"
"""Key of a JSON schema that says which of the types above it describes; the plan's schema uses it and drops it."""

_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_BYTES = {"": 1, "k": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4} | {
    "Ki": 1024,
    "Mi": 1024**2,
    "Gi": 1024**3,
    "Ti": 1024**4,
}
_DURATION = r"(?:\d{1,5}d)?(?:\d{1,6}h)?(?:\d{1,7}m)?(?:\d{1,9}s)?"
_SIZE = r"(\d{1,15})(Ki|Mi|Gi|Ti|k|M|G|T)?B"
_TEXT_LIMIT = 2000
_PERCENT = r"(\d{1,3}(?:\.\d{1,3})?)%"
_YAML_NUMBER = r"[-+]?(?:\d[\d_]*)?(?:\.[\d_]*)?(?:[eE][-+]?\d+)?"
_UNIT = r"[A-Za-z0-9:_.\\-]+(?:@[A-Za-z0-9:_.\\-]+)?\.(?:service|target|timer|socket|slice|scope|mount|path)"


class Plain(str):
    """Text that stood without quotes in a plan: YAML itself might have read it as a number, a date or a truth value."""

    __slots__ = ()


def refuse(what: str, remedy: str = "") -> NoReturn:
    """Refuse a value in an operator's words: what is wrong with it, and what to write instead."""
    raise PydanticCustomError("refused", "{what}", {"what": what, "remedy": remedy})


def written(value: float, unit: str) -> str:
    """A converted value as a plan writes it: (300, "duration") is 5m, (2**31, "size") is 2GiB, (5.0, "percent") 5%."""
    if unit == "percent":
        return f"{value:g}%"
    if unit == "duration":
        return _largest(int(value), _SECONDS, "s")
    return _largest(int(value), {f"{name}B": size for name, size in _BYTES.items()}, "B")


def _largest(value: int, units: dict[str, int], smallest: str) -> str:
    fitting = [(size, name) for name, size in units.items() if value and value % size == 0]
    size, name = max(fitting, default=(1, smallest))
    return f"{value // size}{name}"


def looks_like_number(text: str) -> bool:
    """Whether a YAML reader would take the unquoted `text` for a number (12.10, 1_000, 0777, 1e3)."""
    return any(char.isdigit() for char in text) and re.fullmatch(_YAML_NUMBER, text) is not None


def control_character(text: str, allowed: str = "") -> str | None:
    """The first control, line-separator or surrogate character of `text`, shown as an escape; None if there is none."""
    for char in text:
        code = ord(char)
        bad = code < 32 or 127 <= code < 160 or char in "\u2028\u2029" or 0xD800 <= code < 0xE000
        if bad and char not in allowed:
            return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
    return None


def _plain_text(value: str, noun: str, allowed: str = "") -> str:
    if not value.strip():
        refuse(f"{noun} is empty", f"write {noun} or leave the key out")
    bad = control_character(value, allowed)
    if bad:
        refuse(f"{noun} holds the control character {bad}", "remove it")
    return str(value)


def _no_template(value: str, noun: str) -> None:
    if "{{" in value or "{%" in value:
        refuse(f"{noun} holds a template ({value}); nothing in a plan is templated", "write the value itself")


def _duration(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        refuse("not a duration", "write a number with a unit: 90s, 5m, 2h, 1d")
    if not isinstance(value, str):
        return value
    if not value or re.fullmatch(_DURATION, value, re.ASCII) is None:
        unit = " has no unit" if looks_like_number(value) else " is not a duration"
        refuse(f"{value!s}{unit}" if value else "duration is empty", _duration_hint(value))
    return sum(int(number) * _SECONDS[unit] for number, unit in re.findall(r"(\d+)([dhms])", value))


def _duration_hint(value: str) -> str:
    if re.fullmatch(r"\d{1,9}", value, re.ASCII):
        return f"write the unit: {value}s for seconds, {value}m for minutes"
    return "write a whole number with a unit, largest first: 90s, 5m, 2h, 1d, 1h30m"


def _size(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | str):
        refuse("not a size", "write a whole number with a unit: 512MiB, 2GiB")
    if not isinstance(value, str):
        return value
    match = re.fullmatch(_SIZE, value, re.ASCII)
    if match is None:
        refuse(f"{value!s} is not a size", "write a whole number with a unit: 512MiB, 2GiB, 1TB")
    return int(match[1]) * _BYTES[match[2] or ""]


def _percent(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        refuse("not a percentage", "write a number with a percent sign: 5%")
    if not isinstance(value, str):
        return value
    match = re.fullmatch(_PERCENT, value, re.ASCII)
    if match is None:
        refuse(f"{value!s} is not a percentage", "write a number with a percent sign: 5%")
    return float(match[1])


def _percent_range(value: float) -> float:
    if not 0 <= value <= 100:
        refuse(f"{value:g}% is outside 0% to 100%", "write a percentage between 0% and 100%")
    return value


def _count(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if not isinstance(value, str) or re.fullmatch(r"0|[1-9]\d{0,8}", value, re.ASCII) is None:
        refuse(
            f"{value} is not a whole number" if isinstance(value, str) else "not a whole number", "write digits only: 3"
        )
    return int(value)


def _number(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    if not isinstance(value, str) or re.fullmatch(r"-?\d{1,15}(?:\.\d{1,9})?", value, re.ASCII) is None:
        refuse(f"{value} is not a number" if isinstance(value, str) else "not a number", "write a number: 40 or 0.5")
    return float(value)


def _pointer(value: str) -> str:
    text = _plain_text(value, "JSON pointer")
    if not text.startswith("/") or re.search(r"~(?![01])", text):
        refuse(
            f"{text} is not a JSON pointer",
            "begin it with / and write the keys between slashes: /results/0/tokens_per_s",
        )
    return text


def _regex(value: str) -> str:
    text = _plain_text(value, "regular expression")
    try:
        groups = re.compile(text).groups
    except (re.error, OverflowError, RecursionError) as error:
        refuse(f"{text} is not a regular expression: {error}", "write it as Python's re module reads it")
    if groups != 1:
        refuse(f"{text} has {groups} groups", "put exactly one pair of parentheses around the number: ([0-9.]+) tok/s")
    return text


def _version(value: Any) -> Any:
    if isinstance(value, int | float) or (isinstance(value, Plain) and looks_like_number(value)):
        refuse(f"{value} is read as a number", f'quote it: "{value}"')
    if not isinstance(value, str):
        refuse("not a version", 'write it in quotes: "12.8.1"')
    text = _plain_text(value, "version")
    if not re.fullmatch(r"[0-9][A-Za-z0-9.+~:_-]*", text, re.ASCII):
        refuse(f'"{text}" is not a version', 'a version begins with a digit and holds no blanks: "12.8.1"')
    return text


def _version_or_auto(value: Any) -> Any:
    return OPEN if value == OPEN else _version(value)


def _abs_path(value: str) -> str:
    text = _plain_text(value, "path")
    _no_template(text, "path")
    if text != text.strip():
        refuse(f'path "{text}" begins or ends with a blank', "remove the blank")
    if not text.startswith("/"):
        refuse(f"path {text} is not absolute", "begin it with /")
    if ".." in text.split("/"):
        refuse(f"path {text} holds ..", "write the path that is meant")
    clean = "/" + "/".join(part for part in text.split("/") if part not in ("", "."))
    if clean == "/":
        refuse("path is the root directory /", "name a directory below /")
    return clean


def _name(value: str) -> str:
    text = _plain_text(value, "name")
    _no_template(text, "name")
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.:@+-]*", text, re.ASCII) or len(text) > 128:
        refuse(
            f'"{text}" is not a name', "use letters, digits and . _ : @ + -, at most 128; begin with a letter or digit"
        )
    return text


def _unit(value: str) -> str:
    text = _plain_text(value, "unit")
    _no_template(text, "unit")
    if not re.fullmatch(_UNIT, text, re.ASCII) or text.startswith("-") or len(text) > 255:
        refuse(f'"{text}" is not a systemd unit', "write its full name, suffix included: modelserver.service")
    return text


def _host_pattern(value: str) -> str:
    text = _plain_text(value, "host pattern")
    _no_template(text, "host pattern")
    if text.startswith("-"):
        refuse(f'host pattern "{text}" begins with a dash', "name hosts or groups of the inventory")
    if any(char.isspace() for char in text):
        refuse(f'host pattern "{text}" holds a blank', "write one pattern per list entry, or join them with : or ,")
    if text.startswith("@"):
        refuse(
            f'host pattern "{text}" names a file',
            "list the hosts in the plan, or use --limit @FILE on the command line",
        )
    return text


def _text(value: str) -> str:
    if len(value) > _TEXT_LIMIT:
        refuse(f"text has {len(value)} characters, more than {_TEXT_LIMIT}", "shorten it, or write a ticket instead")
    return _plain_text(value, "text", allowed="\n\t")


def _word(value: str) -> str:
    bad = control_character(value, "\n\t")
    if bad:
        refuse(f"text holds the control character {bad}", "remove it")
    return str(value)


def _schema(pattern: str, says: str, example: str, **more: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "pattern": pattern, "description": says, "examples": [example], **more})


class OneOrMany:
    """Annotation of a tuple: a plan may write its only entry without a list."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(
            lambda value: [value] if isinstance(value, str) else value, handler(source)
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        many = handler(schema)
        return {"anyOf": [many, many["items"]]}


class Short:
    """Annotation of a model: a plan may write one scalar, which is then the parameter `key` alone."""

    def __init__(self, key: str) -> None:
        self.key = key

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(
            lambda value: {self.key: value} if isinstance(value, str) else value, handler(source)
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        whole = handler(schema)
        scalar = handler.resolve_ref_schema(whole)["properties"][self.key]
        return {"anyOf": [whole, {key: value for key, value in scalar.items() if key not in ("default", "title")}]}


Count = Annotated[int, BeforeValidator(_count), WithJsonSchema({"type": "integer", "minimum": 0})]
Number = Annotated[float, BeforeValidator(_number), WithJsonSchema({"type": "number"})]
Pointer = Annotated[str, AfterValidator(_pointer), _schema(r"^/", "JSON pointer (RFC 6901).", "/results/0/rate")]
Regex = Annotated[str, AfterValidator(_regex), _schema(r"\(", "Regular expression with one group.", "([0-9.]+) tok/s")]
Duration = Annotated[
    int,
    BeforeValidator(_duration),
    _schema(r"^(?=.)(\d+d)?(\d+h)?(\d+m)?(\d+s)?$", "Time with a unit.", "5m", **{UNIT: "duration"}),
]
Size = Annotated[
    int, BeforeValidator(_size), _schema(r"^\d+(Ki|Mi|Gi|Ti|k|M|G|T)?B$", "Size with a unit.", "2GiB", **{UNIT: "size"})
]
Percent = Annotated[
    float,
    BeforeValidator(_percent),
    AfterValidator(_percent_range),
    _schema(r"^\d{1,3}(\.\d+)?%$", "Percentage with its sign.", "5%", **{UNIT: "percent"}),
]
Version = Annotated[
    str, BeforeValidator(_version), _schema(r"^[0-9][A-Za-z0-9.+~:_-]*$", "Version, in quotes.", "12.8.1")
]
VersionOrAuto = Annotated[
    str,
    BeforeValidator(_version_or_auto),
    _schema(r"^(auto|[0-9][A-Za-z0-9.+~:_-]*)$", "Version, in quotes; auto: the newest known to fit.", "12.8.1"),
]
AbsPath = Annotated[str, AfterValidator(_abs_path), _schema(r"^/.*[^/\s]", "Absolute path, no `..`.", "/srv/models")]
UnitName = Annotated[
    str,
    AfterValidator(_unit),
    _schema(r"^[^-\s][^\s]*\.[a-z]+$", "Full name of a systemd unit.", "modelserver.service"),
]
HostPattern = Annotated[
    str, AfterValidator(_host_pattern), _schema(r"^[^-@\s][^\s]*$", "Ansible host pattern.", "gpu_hosts")
]
Name = Annotated[
    str, AfterValidator(_name), _schema(r"^[A-Za-z0-9_][A-Za-z0-9_.:@+-]*$", "Name without blanks.", "gpu")
]
Text = Annotated[str, AfterValidator(_text), _schema(r"\S", "Free text, never templated.", "CUDA 12.8")]
Word = Annotated[str, AfterValidator(_word), WithJsonSchema({"type": "string"})]


def _argv(value: tuple[str, ...]) -> tuple[str, ...]:
    if not value or not value[0].strip():
        refuse("the command is empty", 'write program and arguments as a list: [/usr/bin/true, "on"]')
    return value


Argv = Annotated[tuple[Word, ...], AfterValidator(_argv)]
