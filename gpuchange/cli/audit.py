"""The verb audit: was a journal altered? Heads kept elsewhere also show what was cut off its end."""

from __future__ import annotations

import re
from pathlib import Path

import click

from gpuchange.cli import changes, words
from gpuchange.cli.settings import common, current
from gpuchange.errors import GpuchangeError, JournalError, TamperedError, UsageError
from gpuchange.journal import Head

_HASH = re.compile(r"[0-9a-f]{64}")
_LINE = re.compile(r"(?P<change>\S+) (?P<seq>\d{1,18}) (?P<hash>[0-9a-f]{64})")
MAX_BYTES = 16 << 20
TAIL = "events cut off its end would not show: only a head kept elsewhere tells (gpuchange audit head, then --head)"


@click.group()
def audit() -> None:
    """Check the journal of a change, or print its head to be kept elsewhere."""


@audit.command("head")
@click.argument("change", required=False)
@common
def audit_head(change: str | None) -> None:
    """Print the head of CHANGE's journal (default: the latest): its id, the number of events, and their chain's hash.

    Keep it where the journal's keeper cannot write: `audit verify --head` then finds what was cut off or made anew.
    """
    directory = changes.find(current().root, change)
    seq, digest = _sound(directory, None)
    if current().json:
        words.say(words.as_json({"type": "head", "change": directory.name, "seq": seq, "hash": digest}))
    else:
        words.say(f"{directory.name} {seq} {digest}")


@audit.command("verify")
@click.argument("change", required=False)
@click.option("--head", "anchors", multiple=True, metavar="FILE|HASH", help="A head that was kept, or a file of such.")
@common
def audit_verify(change: str | None, anchors: tuple[str, ...]) -> None:
    """Recompute the hash chain of CHANGE's journal (default: the latest), bodies included; exit 8 if it was altered.

    Without --head, events cut off its end cannot be told from events never written.
    """
    directory = changes.find(current().root, change)
    known = [head for anchor in anchors for head in _heads(anchor, directory.name)]
    heads = [_sound(directory, head) for head in known] or [_sound(directory, None)]
    seq, digest = heads[-1]
    if current().json:
        told = {"change": directory.name, "events": seq, "head": digest, "anchors": len(known)}
        words.say(words.as_json({"type": "audit", **told}))
        return
    words.say(f"{directory.name}: {seq} events, the chain is whole; its head is {digest}")
    words.say(f"it holds {len(known)} head(s) that were kept elsewhere" if known else TAIL)


def _heads(anchor: str, change: str) -> list[Head | str]:
    """The heads that an --head names for `change`: a hash, or a file of lines as `audit head` prints them."""
    if _HASH.fullmatch(anchor):
        return [anchor]
    lines = _text(Path(anchor)).split("\n")
    found = [_LINE.fullmatch(line.strip()) for line in lines if line.strip()]
    if not all(found) or not found:
        remedy = "give what `gpuchange audit head` printed, or its hash"
        raise UsageError("this file holds something else than heads", where=anchor, remedy=remedy)
    mine: list[Head | str] = [(int(one["seq"]), one["hash"]) for one in found if one and one["change"] == change]
    if not mine:
        raise UsageError(f"no head of {change} is in this file", where=anchor, remedy="name the file that has it")
    return mine


def _text(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(
            f"--head: cannot read: {why}", where=str(path), remedy="give a file, or 64 hex digits"
        ) from None


def _sound(directory: Path, anchor: Head | str | None) -> Head:
    """The journal's head, if it is whole and holds `anchor`. Raises TamperedError."""
    try:
        return changes.verify(directory, anchor)
    except JournalError as error:
        raise TamperedError(error.what, where=error.where, why=error.why, remedy=error.remedy) from None
    except GpuchangeError:
        raise
    except (ValueError, TypeError, RecursionError) as error:  # what a forger put in, SQLite handed on
        what = "the journal was tampered with: it holds what gpuchange never writes"
        raise TamperedError(what, where=str(directory), why=str(error)[:200], remedy="look at the hosts") from None
