"""How things are written for people: streams, colours, tables, times, and text from hosts made harmless."""

from __future__ import annotations

import codecs
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click

from gpuchange.errors import UsageError
from gpuchange.history import moment

_PLAIN = {"→": "->", "—": "-", "–": "-", "…": "...", "·": "*", "✓": "ok", "✗": "x", "│": "|", "─": "-"}
_UNSEEN = (
    r"\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b-\u200f"
    r"\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\U000110bd\U000110cd\U00013430-\U0001343f"
    r"\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0001\U000e0020-\U000e007f"
)
"""Control, format, direction and separator characters and half surrogates; tab and line feed are not among them."""
_SEQUENCE = r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[@-_]"
_CONTROL = re.compile(f"{_SEQUENCE}|[{_UNSEEN}]")
_OURS = re.compile(f"(\x1b\\[[0-9;]{{1,8}}m)|{_SEQUENCE}|[{_UNSEEN}]")


def _replace(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(_PLAIN.get(letter, "?") for letter in error.object[error.start : error.end]), error.end


def prepare_streams() -> None:
    """Lets a terminal that knows only ASCII (LC_ALL=C) read every line instead of breaking on the first arrow."""
    codecs.register_error("gpuchange", _replace)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure:
            reconfigure(errors="gpuchange")


def clean(text: object, keep_lines: bool = False) -> str:
    """`text` without control, escape and direction characters; on one line unless `keep_lines`.

    Whatever came from a host, an inventory or a plan passes through here before it reaches a terminal.
    """
    bare = _CONTROL.sub("", str(text))
    return bare if keep_lines else " ".join(bare.split())


def harmless(data: Any) -> Any:
    """JSON data with every string (keys too) cleaned, for whoever prints it: `jq -r` shows strings as they are."""
    if isinstance(data, str):
        return clean(data, keep_lines=True)
    if isinstance(data, Mapping):
        return {harmless(key): harmless(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [harmless(item) for item in data]
    return data


def as_json(fields: Any, indent: int | None = None) -> str:
    """Machine output: ASCII JSON in which no string holds a control or direction character."""
    return json.dumps(harmless(fields), indent=indent)


def use_colour(context: click.Context, wanted: bool) -> None:
    """Colour only on a terminal that wants it: --no-color, NO_COLOR and TERM=dumb each switch it off."""
    if not wanted or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        context.color = False


_unheard: str | None = None


@contextmanager
def heard_or_not(told: str) -> Iterator[None]:
    """Nothing in here fails for want of a reader: what cannot be written is dropped, and `told` about it on stderr."""
    global _unheard
    before, _unheard = _unheard, told
    try:
        yield
    finally:
        _unheard = before


def say(text: str = "") -> None:
    """Print on stdout. Raises BrokenPipeError when the reader has gone, UsageError when the place is full, both only
    outside `heard_or_not`.
    """
    try:
        click.echo(_last_look(text), file=sys.stdout)  # named, or click would take an ASCII stream for UTF-8
        if sys.stdout:  # closed from the start (>&-) it is None
            sys.stdout.flush()
    except OSError as error:
        if _unheard is None:
            raise error if isinstance(error, BrokenPipeError) else _unwritable(error) from None
        drop_output()
        warn(f"the output cannot be written any more ({error.strerror}){_unheard}")


def _unwritable(error: OSError) -> UsageError:
    drop_output()
    return UsageError(f"the output cannot be written: {error.strerror}", remedy="write it where there is room")


def drop_output(stream: int = 1) -> None:
    """From now on stdout (or `stream`) leads nowhere: nothing fails on it again, nor when Python closes it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


def warn(text: str) -> None:
    """Print on stderr; when that fails there is nobody left to tell."""
    try:
        click.echo(_last_look(text), file=sys.stderr)
        if sys.stderr:
            sys.stderr.flush()
    except OSError:
        drop_output(2)


def _last_look(text: str) -> str:
    """Colour may pass, nothing else that moves a terminal: also where a caller forgot to clean what a host said."""
    return _OURS.sub(lambda found: found[1] or "", text)


def heading(text: str) -> str:
    return click.style(text, bold=True)


COLOURS = {"done": "green", "rolled back": "yellow", "held": "red", "failed": "red", "needs operator": "red"}


def coloured(word: str) -> str:
    """`word` in the colour of its meaning; the word itself always says it too."""
    return click.style(word, fg=COLOURS[word]) if word in COLOURS else word


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Left-aligned columns, two blanks apart; cells are cleaned here, colour is added after measuring."""
    cells = [[clean(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in [list(head), *cells]) for column in range(len(head))]
    lines = [heading(_row(head, widths))]
    lines += [_row([coloured(cell) for cell in row], widths, row) for row in cells]
    return "\n".join(lines)


def _row(shown: Sequence[str], widths: Sequence[int], measured: Sequence[str] | None = None) -> str:
    measured = measured or shown
    padded = [text + " " * (width - len(bare)) for text, width, bare in zip(shown, widths, measured, strict=True)]
    return "  ".join(padded).rstrip()


def duration(seconds: float) -> str:
    """`seconds` as people say it: 7 s, 2 min 5 s, 1 h 4 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s" if whole % 60 else f"{whole // 60} min"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def clock(at: str, day: bool = False) -> str:
    """An event's time on the operator's own clock."""
    return moment(at).astimezone().strftime("%Y-%m-%d %H:%M:%S" if day else "%H:%M:%S")
