"""Running a change from a terminal: asking first, signals, live progress, and the table at the end."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from gpuchange.cli import again, changes, live, story, words
from gpuchange.cli.settings import current
from gpuchange.errors import UsageError
from gpuchange.states import Event, Kind

if TYPE_CHECKING:
    from gpuchange.change import Connection
    from gpuchange.engine import Engine

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
UNHEARD = "; the change goes on all the same, and gpuchange status shows it"


def confirm(question: str) -> None:
    """Asks on a terminal; --yes answers. Without a terminal --yes is needed. Raises UsageError or click.Abort."""
    if current().yes:
        return
    if current().json or not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(
            "there is no terminal to ask on", why=f"the question: {question}", remedy="look first, then add --yes"
        )
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # Ctrl-C at the question is a no
    try:
        if not click.confirm(question, default=False, err=True):
            raise click.Abort
    finally:
        signal.signal(signal.SIGINT, handler)


def run(
    directory: Path,
    connection: Connection,
    first: Callable[[Engine], int | None] | None = None,
    *,
    only_back: bool = False,
) -> int:
    """Carries the change in `directory` on and returns its exit code; prints where it stands at the end.

    `first` looks and asks before anything is changed; an exit code from it ends the run there. With `only_back` nothing
    is done but on hosts that were turned back.
    """
    from gpuchange.engine import Engine

    if not current().json:
        words.warn(f"change {directory.name}")
    engine = Engine(directory, connection)
    try:
        with stopped_by_signals(engine) as caught:
            _note_flags(engine, connection)
            code = first(engine) if first else None
            if code is not None and not caught:
                return code
            history = changes.read(directory).history
            with words.heard_or_not(UNHEARD), live.progress(history, current().json) as observer:
                engine.observers.append(observer)
                code = engine.run(only_back=only_back)
    finally:
        engine.close()
    with words.heard_or_not(UNHEARD):
        return _ended(changes.read(directory), 128 + caught[0] if caught else code)


def _note_flags(engine: Engine, reach: Connection) -> None:
    """Keep the flags of this controller in the journal: who goes on with the change is told them."""
    flags = again.to_reach(reach, bool(engine.change.reviewed))
    if flags and flags != again.noted(tuple(engine.change.journal.events())):
        engine.note(Event(Kind.NOTE, data={again.NOTED: flags}))


@contextmanager
def stopped_by_signals(engine: Engine) -> Iterator[list[int]]:
    """First signal: start nothing new, finish what is in flight. Second: end the plays. Yields the signals caught."""
    caught: list[int] = []

    def handle(number: int, _frame: FrameType | None) -> None:
        caught.append(number)
        engine.stop(hard=len(caught) > 1)
        again = "; once more ends the plays too (they are looked at on resume)" if len(caught) == 1 else ""
        words.warn(f"stopping after what runs now{again}" if len(caught) == 1 else "ending the plays")

    heeded = [
        one for one in SIGNALS if one is not signal.SIGHUP or signal.getsignal(one) is not signal.SIG_IGN
    ]  # nohup
    former = {number: signal.signal(number, handle) for number in heeded}
    try:
        yield caught
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _ended(found: changes.Change, code: int) -> int:
    if current().json:
        live.emit({**changes.as_json(found), "type": "summary", "exit_code": code})
        return code
    words.say("")
    words.say(summary_table(found))
    words.say(f"most hosts out of service at once: {found.history.most_out}")
    for line in (*changes.reasons(found), *_proof(found), *changes.open_work(found), *changes.questions(found)):
        words.say(line)
    words.say(f"\n{words.heading(found.outcome)} (exit {code})\nnext: {changes.next_command(found, code)}")
    return code


def _proof(found: changes.Change) -> list[str]:
    lines = [f"  {words.clean(host)} {words.clean(line)}" for host, _, line in changes.findings(found, "undo")]
    return ["going back, this was found:", *lines] if lines else []


SUMMARY_HEAD = ("HOST", "DRIVER", "CUDA", "CUDNN", "CONTAINER TOOLKIT", "RESULT", "OUT OF SERVICE")


def summary_table(found: changes.Change) -> str:
    return words.table(SUMMARY_HEAD, summary_rows(found))


def summary_rows(found: changes.Change) -> list[tuple[str, ...]]:
    """Per host: versions before → after, where it stands, how long it was out of service."""
    from gpuchange import preview

    rows: list[tuple[str, ...]] = []
    working = found.alive
    for host in found.hosts:
        before, after = (preview.found_versions(body) for body in changes.first_and_last(found, host))
        stands, at = story.standing(found.state.hosts[host], working)
        result = f"{stands} ({at})" if at else stands
        rows.append((host, *preview.moved(before, after), result, changes.out_of_service(found, host)))
    return rows
