"""Secrets in a plan: none may stand there in clear. Looked for before the models read, so that no error quotes one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gpuchange import clear_secrets
from gpuchange.plan.problems import Path, Problem
from gpuchange.plan.yamlpos import Document, dotted

REMEDY = (
    "take it out: a plan is kept and shown. Variables of hosts belong into the inventory, encrypted with "
    "ansible-vault; a hook reads its secret from a file of its own"
)


def secrets(document: Document) -> list[Problem]:
    """One Problem for each value that looks like a secret; its text is not repeated."""
    return [
        Problem(document.values[path], f"{dotted(path)} holds a secret in clear: {what}", REMEDY, path)
        for path, what in _inside(document.data, ())
    ]


def without_echoes(problems: Sequence[Problem], found: Sequence[Problem]) -> list[Problem]:
    """The problems that speak of something else than what was `found` to be a secret: others might quote it."""
    return [*found, *(one for one in problems if not any(_about(one, secret) for secret in found))]


def _about(problem: Problem, secret: Problem) -> bool:
    return problem.path is None or problem.path == (secret.path or ())[: len(problem.path)]


def _inside(data: Any, path: Path) -> Iterator[tuple[Path, str]]:
    if isinstance(data, dict):
        for key, value in data.items():
            yield from _value(key, value, (*path, key))
    elif isinstance(data, list):
        words = clear_secrets.in_words(item if isinstance(item, str) else "" for item in data)
        for index, item in enumerate(data):
            yield from [((*path, index), words[index])] if index in words else _inside(item, (*path, index))
    elif isinstance(data, str) and (what := clear_secrets.in_text(data)):
        yield path, what


def _value(key: str, value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    if isinstance(value, str) and clear_secrets.names_one(key) and not clear_secrets.is_reference(value):
        yield path, f"the value of {key}"
    else:
        yield from _inside(value, path)
