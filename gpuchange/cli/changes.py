"""Changes on disk, read without taking them over: found by name, folded from their journals, summed up.

Reads the journal only, so that it works without Ansible and while another process carries the change out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

from gpuchange.cli import again, story
from gpuchange.cli.words import clean, clock, duration
from gpuchange.confirming import Confirmations
from gpuchange.errors import GpuchangeError, UsageError
from gpuchange.fold import Ask
from gpuchange.history import History, typical
from gpuchange.journal import Head, Journal
from gpuchange.locking import holder, lives
from gpuchange.phases import PHASES
from gpuchange.planner import HostState, State, Table, exit_code
from gpuchange.states import Event, Kind

JOURNAL, AGREED = "journal.db", "agreed"
FAILINGS = frozenset({Kind.REJECTED, Kind.HELD})
LEARNED_FROM, MOST_EVENTS = 5, 20_000  # changes, and events of each, that estimates are made of


@dataclass(frozen=True)
class Change:
    """A change as its journal tells it."""

    directory: Path
    meta: dict[str, Any]
    events: tuple[Event, ...]
    state: State
    history: History
    hands: Confirmations

    @property
    def id(self) -> str:
        return self.directory.name

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(self.meta["hosts"])

    @property
    def began(self) -> str:
        return self.events[0].at if self.events else ""

    @property
    def name(self) -> str:
        return next((str(e.data.get("plan", "")) for e in self.events if e.kind is Kind.CREATED), "")

    @property
    def code(self) -> int:
        return exit_code(self.state)

    @property
    def agreed(self) -> bool:
        """Whether somebody said yes to its preview, or has taken it in hand since."""
        noted = any(event.kind is Kind.NOTE and event.data.get(AGREED) for event in self.events)
        return noted or self.state.counts.touched > 0

    @property
    def alive(self) -> bool:
        """Whether a controller has it in hand now, as far as this machine can tell."""
        return alive(self.directory)

    @property
    def outcome(self) -> str:
        return story.outcome(self.events, self.state, self.alive)


def directories(root: Path) -> list[Path]:
    """The change directories below `root`, newest first: by the second in their names, then by when they were made."""
    if not root.is_dir():
        return []
    return sorted((path for path in root.iterdir() if (path / JOURNAL).is_file()), key=_made, reverse=True)


def _made(directory: Path) -> tuple[str, int, str]:
    frozen, second = directory / "frozen", len("20261130-174501")
    return directory.name[:second], frozen.stat().st_mtime_ns if frozen.is_dir() else 0, directory.name


def find(root: Path, name: str | None, meant: Callable[[Path], bool] | None = None) -> Path:
    """The change called `name` (or the only one whose name holds it); if None, the latest that is `meant`, else the
    latest. Raises UsageError.
    """
    known = directories(root)
    if not known:
        raise UsageError(
            "there is no change yet",
            where=str(root),
            remedy="begin one: gpuchange apply PLAN; or give the --state-dir that has some",
        )
    if name is None:
        return next(filter(meant, known), known[0]) if meant else known[0]
    exact = [path for path in known if path.name == name]
    near = exact or [path for path in known if name in path.name]
    if len(near) == 1:
        return near[0]
    if near:
        listed = ", ".join(path.name for path in near[:5])
        raise UsageError(f"{name} fits {len(near)} changes: {listed}", remedy="give more of its name")
    raise UsageError(f"no change is called {name}", where=str(root), remedy=again.command("list"))


def undoable(directory: Path) -> bool:
    """Whether the change did something to a host that is not taken back: what `rollback` alone can mean."""
    return any(host.touched and not host.rolled_back for host in _hosts(directory))


def unfinished(directory: Path) -> bool:
    """Whether there is more to do than a refused `apply` leaves behind: what `resume` alone can mean."""
    going = any(host.held or not host.finished for host in _hosts(directory))
    return going and ((found := read(directory)).agreed or found.outcome == story.CUT_SHORT)


def _hosts(directory: Path) -> list[HostState]:
    """Where the change's hosts stand; none when its journal is damaged: no other change's verb stops at that."""
    try:
        return list(read(directory).state.hosts.values())
    except GpuchangeError:
        return []


def read(directory: Path) -> Change:
    """Folds the journal in `directory`. Raises JournalError if it contradicts itself."""
    with Journal.open(directory / JOURNAL, readonly=True) as journal:
        meta, events = dict(journal.meta), tuple(journal.events())
    state, history, hands = State(table(meta), tuple(meta["hosts"])), History(), Confirmations()
    for event in events:
        state.apply(event)
        history.see(event, state)
        hands.fold(event)
    return Change(directory, meta, events, state, history, hands)


def step_seconds(root: Path) -> dict[str, float]:
    """How long each step took in the latest changes below `root`, for estimates; what cannot be read tells nothing."""
    return typical(_first_events(directory) for directory in directories(root)[:LEARNED_FROM])


def _first_events(directory: Path) -> list[Event]:
    try:
        with Journal.open(directory / JOURNAL, readonly=True) as journal:
            return list(islice(journal.events(), MOST_EVENTS))
    except GpuchangeError:
        return []


def alive(directory: Path) -> bool:
    """Whether a controller on this machine has the change in hand. Taking the lock to find out would disturb one."""
    return lives(holder(directory))


def table(meta: dict[str, Any]) -> Table:
    """The change's own table of steps, as it was when it began."""
    steps = [(str(phase), str(provider)) for phase, provider in meta["table"]]
    return Table.build(PHASES, lambda phase: [name for where, name in steps if where == phase])


LOOKED = frozenset({("record/host", "do"), ("seal/host", "do"), ("verify/host", "do"), ("seal/host", "undo")})
"""(step, direction) of the reports that tell a host's versions."""


def first_and_last(found: Change, host: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The report bodies that tell what `host` was like at first and at the last look; {} when nobody looked."""
    digests = [
        e.body
        for e in found.events
        if e.host == host and e.body and e.kind is Kind.ACCEPTED and (f"{e.phase}/{e.provider}", e.direction) in LOOKED
    ]
    if not digests:
        return {}, {}
    with Journal.open(found.directory / JOURNAL, readonly=True) as journal:
        return dict(journal.body(digests[0])), dict(journal.body(digests[-1]))


def verify(directory: Path, anchor: Head | str | None = None) -> Head:
    """Recomputes the hash chain: (number of events, head digest). Raises JournalError where it breaks, or where it
    does not hold `anchor`, a head (or its hash) that was kept elsewhere.
    """
    with Journal.open(directory / JOURNAL, readonly=True) as journal:
        journal.verify(anchor)
        return journal.head()


def headline(found: Change) -> str:
    return f"{found.id} ({clean(found.name)}): {found.outcome}, {len(found.hosts)} host(s)"


def open_work(found: Change) -> list[str]:
    """Who is out of service now, since when, and at which phase."""
    lines = []
    for host, since in sorted(found.history.out_since.items()):
        _, at = story.standing(found.state.hosts[host])
        lines.append(f"{clean(host)} out of service since {clock(since)} by this change ({at})")
    return lines


def reasons(found: Change) -> list[str]:
    """Why each host that went back did so; what is still a question is told by `questions`."""
    lines = []
    for host, standing in found.state.hosts.items():
        failed = [e for e in found.events if e.host == host and e.direction == "do" and e.kind in FAILINGS]
        if standing.turned and failed:
            lines.append(f"why {clean(host)} went back: {story.sentence(failed[-1])}")
    return lines


def command(found: Change, verb: str, *words: str) -> str:
    """`gpuchange VERB` about this change, to be copied: with the flags given now, else those it was reached with."""
    return again.command(verb, found.id, *words, noted=again.noted(found.events))


def questions(found: Change) -> list[str]:
    """What waits for a human, and the command that answers it."""
    lines = []
    for host in found.hosts:
        standing = found.state.hosts[host]
        lines += _asked(found, host)
        if story.needs_answer(standing):
            last = found.history.last.get(host)
            lines.append(f"{clean(host)}: {story.sentence(last) if last else 'held'}")
            lines.append(f"  next: {command(found, 'resolve', clean(host))} --retry | --done | --undo | --leave")
    return [*lines, *_places(found)]


def _places(found: Change) -> list[str]:
    """Who waits for the place of a host that was left out of service, and how to take that one up again."""
    hosts = found.state.hosts
    waits = [name for name, host in hosts.items() if host.stance.ask in (Ask.SLOT, Ask.SLOT_BACK)]
    left = [name for name in sorted(found.history.out_since) if hosts[name].left]
    if not waits or not left:
        return []
    told = f"{clean(', '.join(left))} left out of service, which counts: {clean(', '.join(waits))} may have to wait"
    return [told, *(f"  next: {command(found, 'resolve', clean(name))} --undo" for name in left)]


def _asked(found: Change, host: str) -> list[str]:
    """What the host's step asks an operator to do by hand."""
    asked = found.hands.of(host)
    if asked is None:
        return []
    answer = command(found, "confirm", clean(host))
    return [*(f"{clean(host)}: {clean(line)}" for line in asked[1].lines), f"  next: {answer}"]


def findings(found: Change, direction: str) -> list[tuple[str, str, str]]:
    """(host, step, line) that judges found; those of "undo" are the comparisons that prove a rollback."""
    return [
        (event.host, f"{event.phase}/{event.provider}", str(line))
        for event in found.events
        if event.direction == direction
        for line in event.data.get("findings", ())
    ]


def next_command(found: Change, code: int) -> str:
    """What to run after the change ended with `code`."""
    if code > 128 or found.outcome in story.GOES_ON_BY_RESUME:  # 128 and the number of the signal
        return command(found, "resume")
    if code in (5, 6):
        return command(found, "status")
    return f"{command(found, 'report')} -o report.html"


def summary(found: Change) -> dict[str, Any]:
    fields = {"change": found.id, "name": found.name, "began": found.began, "stands": found.outcome}
    return {"type": "change", **fields, "hosts": len(found.hosts), "exit_code": found.code}


def as_json(found: Change) -> dict[str, Any]:
    working = found.alive
    return {**summary(found), "type": "status", "hosts": [_host_json(found, host, working) for host in found.hosts]}


def _host_json(found: Change, host: str, working: bool) -> dict[str, Any]:
    stands, at = story.standing(found.state.hosts[host], working)
    last = found.history.last.get(host)
    return {
        "host": host,
        "stands": stands,
        "at": at,
        "since": last.at if last else "",
        "out_since": found.history.out_since.get(host),
        "out_seconds": found.history.out_seconds(host, datetime.now(UTC).isoformat()),
        "why": str(last.data.get("why", "")) if last else "",
        "asks": list(asked[1].lines) if (asked := found.hands.of(host)) else [],
    }


def event_fields(event: Event) -> dict[str, Any]:
    return {**asdict(event), "kind": event.kind.value}


def out_of_service(found: Change, host: str) -> str:
    """How long `host` did not serve, as people say it; "-" if it never stopped."""
    out = found.history.out_seconds(host, found.events[-1].at)
    return duration(out) if out else "-"
