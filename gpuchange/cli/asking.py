"""The question before a change: preflight, preview, yes or no. What was agreed to stands in the journal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gpuchange.cli import changes, live, render, running, words
from gpuchange.cli.settings import current
from gpuchange.states import Event, Kind

if TYPE_CHECKING:
    from gpuchange.change import Connection
    from gpuchange.engine import Engine
    from gpuchange.looking import Looks
    from gpuchange.plan import Plan
    from gpuchange.preview import Preview


def carry(directory: Path, reach: Connection, look: str) -> int:
    """Ask unless it was agreed to, then run. Raises click.Abort or UsageError when the answer is no.

    `look`: the command that shows the preview again once what stands in the way is mended.
    """
    if changes.read(directory).agreed:
        return running.run(directory, reach, _recheck)
    return running.run(directory, reach, lambda engine: preflighted(engine, look))


def _recheck(engine: Engine) -> None:
    from gpuchange.looking import still_as_reviewed

    still_as_reviewed(engine)


def preflighted(engine: Engine, look: str) -> int | None:
    """Preflight, preview and question; None when the change may go on, else the exit code."""
    from gpuchange.looking import before_change, still_as_reviewed

    looks = before_change(engine)
    still_as_reviewed(engine)
    seen = show(engine.change.plan, looks, look)
    if looks.code:
        return looks.code
    if not seen.to_change:
        words.warn("every host is as the plan wants it: nothing to do")
        return 0
    running.confirm(f"change {len(seen.to_change)} host(s)?")
    engine.note(Event(Kind.NOTE, data={changes.AGREED: True}))
    return None


def show(plan: Plan, looks: Looks, look: str, go: str = "") -> Preview:
    """Print the preview of what was seen, as text or NDJSON, and the command to run next: `look` or `go`."""
    from gpuchange import preview
    from gpuchange.phases import PHASES

    seen = preview.build(plan, PHASES, looks.hosts, looks.problems, changes.step_seconds(current().root))
    if current().json:
        live.emit(render.preview_json(seen))
    else:
        words.say(render.preview_text(seen, _next(seen, look, go)))
    return seen


def _next(seen: Preview, look: str, go: str) -> str:
    if seen.problems:
        return f"mend what is marked with !, then: {look}"
    if not seen.to_change:
        return "nothing"
    return go or ("carried out at once, as --yes says" if current().yes else "a yes below carries it out")
