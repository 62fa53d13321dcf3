"""Secrets that stand in clear where only a reference belongs: found by name and by shape, never quoted back.

A reference is a vault value, a lookup or template, a shell variable, or the path of a file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_KEY = r"(?:secret|api|private|access)[_-]?key"
_WORD = rf"(?:pass(?:word|wd|phrase|code)|pwd|secret|token|credentials?|{_KEY})"
_PART = r"[A-Za-z0-9]{1,40}[_.-]"  # bounded: hostile text must not make the search slow
_FULL = rf"(?:(?:{_PART}){{0,8}}{_WORD}|(?:{_PART}){{1,8}}pass)"
_NAME = re.compile(_FULL, re.I)
_REFERENCE = re.compile(r"""\s*(?:["']?\{[{%]|!vault|\$ANSIBLE_VAULT|\$[A-Za-z_{(]|["']?[@/~]|[|>{\[]|["']{2}|$)""")
_NO_SECRET = frozenset({"true", "false", "yes", "no", "none", "null"})
_VALUE = r"\"[^\"]{0,400}\"|'[^']{0,400}'|[^\s,;]{1,400}"
_ASSIGNED = re.compile(rf"(?<![A-Za-z0-9])(?P<name>{_FULL})[\"']?\s{{0,9}}(?:=|:\s)\s{{0,9}}(?P<value>{_VALUE})", re.I)
_SHAPES = {
    "an address with a password in it": re.compile(
        r"[A-Za-z][A-Za-z0-9+.-]{0,30}://[^\s/:@]{0,200}:(?P<value>[^\s/@]{1,200})@"
    ),
    "an HTTP login": re.compile(r"Authorization\W{1,9}\w{1,20}\s{1,9}(?P<value>\S{1,200})", re.I),
    "a private key": re.compile(r"-----BEGIN [A-Z0-9 ]{0,30}PRIVATE KEY-----"),
    "an access token": re.compile(
        r"\b(?:gh[pousr]_\w{20}|glpat-[\w-]{16}|AKIA[A-Z0-9]{16}|xox[abprs]-[\w-]{10}|eyJ[\w-]{8,400}\.[\w-]{8,400}\.)"
    ),
}
_LOGIN = frozenset({"-u", "--user"})


class Found(NamedTuple):
    """`line` counts from 1; `what` says what it looks like, without its value."""

    line: int
    what: str


def names_one(name: str) -> bool:
    """Whether a key of this name is there to hold a secret (db_password, API-KEY); not one that names its file."""
    return _NAME.fullmatch(name.strip().lstrip("-")) is not None


def is_reference(value: str) -> bool:
    """Whether a value leads to a secret instead of being one; an empty one and a truth value are none either."""
    return _REFERENCE.match(value) is not None or value.strip().strip("\"'").lower() in _NO_SECRET


def in_text(text: str) -> str:
    """What in `text` looks like a secret in clear; "" if nothing does."""
    for found in _ASSIGNED.finditer(text):
        if not is_reference(found["value"]):
            return f"{found['name']} with its value"
    for what, shape in _SHAPES.items():
        found_shape = shape.search(text)
        if found_shape and not is_reference(found_shape.groupdict().get("value") or "x"):
            return what
    return ""


def in_words(words: Iterable[str]) -> dict[int, str]:
    """Index → what, for a command: also `--password` followed by its value."""
    kept = list(words)
    found = {index: what for index, word in enumerate(kept) if (what := in_text(word))}
    for index in range(1, len(kept)):
        option = kept[index - 1]
        asks = option.startswith("-") and names_one(option)
        if (asks or (option in _LOGIN and ":" in kept[index])) and not is_reference(kept[index]):
            found.setdefault(index, f"the value of {option}")
    return found


def in_variables(text: str) -> Iterator[Found]:
    """Variables of an inventory file (YAML, INI or JSON text) whose names ask for a secret and whose values are one."""
    if text.startswith("$ANSIBLE_VAULT"):
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith(("#", ";")):
            continue
        for found in _ASSIGNED.finditer(line):
            if not is_reference(line[found.start("value") :]):
                yield Found(number, found["name"])
