"""Live progress while a change runs: a table on a terminal, one line an event elsewhere, NDJSON for programs."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import AbstractContextManager, suppress
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Protocol

import click

import gpuchange
from gpuchange.cli import changes, story, words
from gpuchange.cli.settings import current
from gpuchange.history import History
from gpuchange.planner import State
from gpuchange.states import Event

HEARTBEAT_S = 30.0
FORMAT = "1.0"
"""Of the NDJSON: the minor number rises when fields are added, the major when they change their meaning."""


class Progress(AbstractContextManager["Progress"], Protocol):
    """An observer that is open for as long as the change runs."""

    def __call__(self, event: Event, state: State) -> None: ...


class Ndjson:
    """One JSON object a line on stdout; the first one says which version speaks."""

    def __enter__(self) -> Ndjson:
        return self

    def __call__(self, event: Event, state: State) -> None:
        emit({"type": "event", **changes.event_fields(event)})

    def __exit__(self, *_: object) -> None:
        return None


def emit(fields: dict[str, Any]) -> None:
    """Writes one object; before the first one of this command line, the one that says which version speaks."""
    settings = current()
    if not settings.spoke:
        settings.spoke = True
        emit({"type": "version", "gpuchange": gpuchange.__version__, "format": FORMAT})
    words.say(words.as_json(fields))


class Plain:
    """`12:31:02 gpu1 drain/haproxy done (7 s)`; a line each 30 s when nothing happens, so that nobody wonders."""

    def __init__(self, history: History, heartbeat_s: float = HEARTBEAT_S) -> None:
        self.history, self.heartbeat_s = history, heartbeat_s
        self._spoke, self._said = time.monotonic(), dict[tuple[str, str, str], str]()
        self._working: dict[str, tuple[tuple[str, ...], str]] = {}  # host → step and what it waits for
        self._lock, self._over = threading.Lock(), threading.Event()
        self._pulse = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Plain:
        self._pulse.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._pulse.join()

    def __call__(self, event: Event, state: State) -> None:
        self.history.see(event, state)
        self._note(event)
        if event.kind in story.QUIET or self._repeats(event):
            return
        took = self.history.took.get((event.host, event.phase, event.provider, event.direction))
        self._print("\n".join([f"{words.clock(event.at)} {story.sentence(event, took)}", *story.asked(event)]))

    def _note(self, event: Event) -> None:
        if event.host and event.phase:
            with self._lock:
                step, said = (event.phase, event.provider, event.direction), story.sentence(event)
                former, waits = self._working.pop(event.host, ((), ""))
                if event.kind in story.GOES_ON:
                    looks_again = former == step and event.kind in story.BEGINS
                    self._working[event.host] = (step, waits if looks_again else said)

    def _repeats(self, event: Event) -> bool:
        """A wait is said once, and again only when its reason is another."""
        step = (event.host, event.phase, event.provider)
        said, self._said[step] = self._said.get(step), story.sentence(event)
        return said == self._said[step]

    def _print(self, line: str) -> None:
        with self._lock:
            self._spoke = time.monotonic()
        words.say(line)

    def _beat(self) -> None:
        while not self._over.wait(min(1.0, self.heartbeat_s / 4)):
            with self._lock:
                silent = time.monotonic() - self._spoke
                working = "; ".join([said for _, said in self._working.values()][:3])
            if silent >= self.heartbeat_s:
                now = datetime.now(UTC).isoformat()
                self._print(f"{words.clock(now)} still at work ({words.duration(silent)} without news): {working}")


class Screen:
    """A table on the terminal, one row a host: where it stands, since when, how long out of service."""

    def __init__(self, history: History) -> None:
        from rich.console import Console
        from rich.live import Live

        self.history = history
        self._rows: dict[str, tuple[str, str, str]] = {}
        self._asked: dict[str, list[str]] = {}
        self._lock = threading.Lock()
        console = Console()
        self._room = max(5, console.height - 6)
        self._live = Live(console=console, get_renderable=self._table, refresh_per_second=4, transient=True)

    def __enter__(self) -> Screen:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # the terminal has gone
            self._live.stop()

    def __call__(self, event: Event, state: State) -> None:
        self.history.see(event, state)
        if event.host:
            stands, at = story.standing(state.hosts[event.host])
            with self._lock:
                # Latest last: a screen too small for the fleet shows the hosts that move.
                self._rows.pop(event.host, None)
                self._rows[event.host] = (stands, at, event.at)
                if event.kind not in story.QUIET or event.data.get("confirmed"):
                    self._asked[event.host] = [f"{event.host}:", *lines] if (lines := story.asked(event)) else []

    def _table(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        now = datetime.now(UTC).isoformat()
        table = Table(box=None, pad_edge=False)
        for column in ("HOST", "STANDS", "AT", "SINCE", "OUT OF SERVICE"):
            table.add_column(column, no_wrap=True)
        with self._lock:
            shown = sorted(list(self._rows.items())[-self._room :])
            hidden = len(self._rows) - len(shown)
            out = {host: self.history.out_seconds(host, now) for host, _ in shown}
            notes = [line for lines in self._asked.values() for line in lines]
        for host, (stands, at, since) in shown:
            cells = (host, stands, at, words.clock(since), words.duration(out[host]) if out[host] else "-")
            table.add_row(*(Text(words.clean(cell)) for cell in cells))  # no markup: [link=…] stays text
        notes += [f"and {hidden} more"] if hidden else []
        if notes:
            table.caption_justify = "left"
            table.caption = Text("\n".join(words.clean(line, keep_lines=True) for line in notes))
        return table


def progress(history: History, as_json: bool) -> Progress:
    """The progress that fits: NDJSON if asked for, a live table on a capable terminal, else plain lines."""
    if as_json:
        return Ndjson()
    context = click.get_current_context(silent=True)
    if sys.stdout.isatty() and (context is None or context.find_root().color is not False):
        return Screen(history)
    return Plain(history)
