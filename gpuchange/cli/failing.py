"""How a failure is said: what happened, where, how things stand, what to do next. And its exit code."""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Sequence

import click

from gpuchange.cli import again, words
from gpuchange.errors import GpuchangeError, UsageError

USAGE = UsageError.exit_code
INTERRUPTED = 130


def told(error: BaseException, arguments: Sequence[str]) -> int:
    """Prints `error` for people (and as JSON when asked for) and returns the exit code that it stands for."""
    as_json = "--json" in arguments
    match error:
        case SystemExit():
            return error.code if isinstance(error.code, int) else 0
        case BrokenPipeError():
            # The reader has gone (`| head`): nobody is left to tell, and Python must not complain at exit.
            words.drop_output()
            return 1
        case KeyboardInterrupt() | click.Abort():
            words.warn("interrupted")
            return INTERRUPTED
        case click.exceptions.NoArgsIsHelpError():
            words.warn(error.format_message())
            return USAGE
        case click.ClickException():
            return _print(_from_click(error), as_json)
        case GpuchangeError():
            return _print(_placed(error, arguments), as_json)
        case _:
            return _print(_placed(_unexpected(error), arguments), as_json)


def _placed(error: GpuchangeError, arguments: Sequence[str]) -> GpuchangeError:
    for one in (error, *getattr(error, "others", ())):
        one.remedy = again.with_place(one.remedy, again.given_place(arguments))
    return error


def _from_click(error: click.ClickException) -> GpuchangeError:
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "gpuchange"
    return UsageError(error.format_message(), remedy=f"{command} --help")


def _unexpected(error: BaseException) -> GpuchangeError:
    text = "".join(traceback.format_exception(error))
    stamp = time.strftime("%Y%m%d-%H%M%S")
    with tempfile.NamedTemporaryFile("w", prefix=f"gpuchange-{stamp}-", suffix=".txt", delete=False) as out:
        out.write(text)  # mode 0600 by tempfile: a traceback may quote data of the plan
    return GpuchangeError(
        f"unexpected {type(error).__name__}: {str(error).splitlines()[0] if str(error) else '(no message)'}",
        why=f"this is a defect of gpuchange; the details are in {out.name}",
        remedy="the change's journal is safe: gpuchange status shows how things stand, gpuchange resume goes on",
    )


def _print(error: GpuchangeError, as_json: bool) -> int:
    for one in (error, *getattr(error, "others", ())):  # a plan's faults are all said at once
        words.warn(sentence(one))
        if as_json:
            fields = {"what": one.what, "where": one.where, "why": one.why, "remedy": one.remedy}
            with words.heard_or_not(""):
                words.say(words.as_json({"type": "error", **fields, "exit_code": one.exit_code}))
    left_out = getattr(error, "left_out", 0)
    if left_out:
        words.warn(f"and {left_out} more")
    return error.exit_code


def sentence(error: GpuchangeError) -> str:
    """The error as lines: what, then where, why and next, each only if known."""
    head = click.style("error: ", fg="red", bold=True) + _indented(error.what)
    parts = (("where", error.where), ("why", error.why), ("next", error.remedy))
    lines = [f"  {name + ':':6} {_indented(text)}" for name, text in parts if text]
    return "\n".join([head, *lines])


def _indented(text: str) -> str:
    """Further lines stand deeper than our own: what a host said cannot pass for a line that says what to do next."""
    return words.clean(text, keep_lines=True).strip().replace("\n", "\n         ")
