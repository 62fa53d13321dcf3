"""Commands as an operator can copy them: a verb, its words, and the flags that the running command line was given."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from gpuchange.cli.settings import Settings
from gpuchange.states import Event, Kind

if TYPE_CHECKING:
    from gpuchange.change import Connection

NOTED = "flags"
"""Key of the note in which a change keeps the flags it was reached with, for whoever proposes a command later."""

_KEYS = ("ask_become_pass", "private_key", "forks", "vault_id", "vault_password_file", "accept_new_host_keys")
_LOGIN = ("extra_vars", "user", "become", *_KEYS)
_REACH = ("inventory", "limit", *_LOGIN)
_APPROVED = ("require_approvals", "allowed_signers")
TAKES: dict[str, tuple[str, ...]] = {
    "plan": _REACH,
    "verify": _REACH,
    "unlock": _REACH,
    "apply": (*_REACH, "accept_irreversible", *_APPROVED),
    "resume": _LOGIN,
    "rollback": _LOGIN,
}
"""verb → the flags that it takes and that a command must repeat; a change has its own copy of the inventory."""
BUNDLED: dict[str, tuple[str, ...]] = {"plan": _KEYS, "apply": (*_KEYS, *_APPROVED)}
"""The same where a bundle says the rest."""

_READS_CHANGES = "status|resume|rollback|resolve|confirm|pause|abort|list|show|report|audit|apply|plan|unlock"


def command(verb: str, *words: object, bundled: bool = False, noted: str = "") -> str:
    """`gpuchange VERB WORDS` with the flags given now, quoted for a shell; without any, those `noted` earlier."""
    wanted = BUNDLED[verb] if bundled else TAKES.get(verb, ())
    flags = shlex.join(_given(wanted)) or (noted if wanted else "")
    place = shlex.join(_state_dir())
    return " ".join(part for part in (f"gpuchange {verb}", shlex.join(map(str, words)), flags, place) if part)


def to_reach(reach: Connection, reviewed: bool) -> str:
    """The flags that resume and rollback need again, from wherever they are called; a bundle keeps its own -e.

    No secret: -K asks, and -e refuses secrets in clear.
    """
    kept = replace(reach, extra_vars=()) if reviewed else reach
    return " ".join(part for part in (kept.cmdline(), "-K" if reach.become_password else "") if part)


def noted(events: Sequence[Event]) -> str:
    """The flags that a change was reached with last, as its journal has them."""
    kept = (event.data[NOTED] for event in reversed(events) if event.kind is Kind.NOTE and NOTED in event.data)
    return str(next(kept, ""))


def with_place(text: str, root: str) -> str:
    """Commands in an error's remedy, which knows no flags, with the state directory that was given."""
    new, flag = root and "--state-dir" not in text, shlex.join(["--state-dir", root])
    return re.sub(rf"\bgpuchange (?=(?:{_READS_CHANGES})\b)", lambda _: f"gpuchange {flag} ", text) if new else text


def given_place(arguments: Sequence[str]) -> str:
    """The --state-dir of a command line that has failed; "" when it names none."""
    for at, word in enumerate(arguments):
        if word == "--state-dir":
            return "".join(arguments[at + 1 : at + 2])
        if word.startswith("--state-dir="):
            return word.partition("=")[2]
    return ""


def _state_dir() -> list[str]:
    context = click.get_current_context(silent=True)
    settings = context.find_object(Settings) if context else None
    return ["--state-dir", settings.given] if settings and settings.given else []


def _given(wanted: Sequence[str]) -> list[str]:
    context = click.get_current_context(silent=True)
    if context is None:
        return []
    options = {str(one.name): one for one in context.command.params if isinstance(one, click.Option)}
    said = [name for name in wanted if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    return [word for name in said for word in _written(options[name], context.params.get(name))]


def _written(option: click.Option, value: Any) -> Iterator[str]:
    flag = option.opts[0]
    if option.is_flag:
        yield from [flag] if value else []
        return
    for one in value if option.multiple else [value]:
        yield from (flag, str(one))
