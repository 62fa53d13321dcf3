"""Verbs that only read journals: status, list, show. They need neither Ansible nor the hosts."""

from __future__ import annotations

from datetime import UTC, datetime

import click

from gpuchange.cli import changes, story, words
from gpuchange.cli.settings import common, current


@click.command()
@click.argument("change", required=False)
@common
def status(change: str | None) -> None:
    """Where each host of CHANGE (default: the one under way, else the latest) stands, and what needs an answer."""
    found = changes.read(changes.find(current().root, change, changes.alive))
    if current().json:
        words.say(words.as_json(changes.as_json(found)))
        return
    words.say(changes.headline(found) + "\n")
    working = found.alive
    rows = [_row(found, host, working) for host in found.hosts]
    words.say(words.table(("HOST", "STANDS", "AT", "SINCE", "OUT OF SERVICE"), rows))
    for line in (*changes.reasons(found), *changes.open_work(found), *changes.questions(found)):
        words.say(line)


def _row(found: changes.Change, host: str, working: bool) -> tuple[str, str, str, str, str]:
    last = found.history.last.get(host)
    now = datetime.now(UTC).isoformat()
    out = found.history.out_seconds(host, now)
    stands, at = story.standing(found.state.hosts[host], working)
    return host, stands, at, words.clock(last.at) if last else "", words.duration(out) if out else "-"


@click.command("list")
@common
def list_changes() -> None:
    """The changes kept here, newest first."""
    found = [changes.read(path) for path in changes.directories(current().root)]
    if current().json:
        for one in found:
            words.say(words.as_json(changes.summary(one)))
        return
    if not found:
        words.say(f"no change yet in {current().root}")
        return
    rows = [(one.id, words.clock(one.began, day=True), one.name, len(one.hosts), one.outcome) for one in found]
    words.say(words.table(("CHANGE", "BEGAN", "PLAN", "HOSTS", "STANDS"), rows))


@click.command()
@click.argument("change", required=False)
@click.option("--host", help="Only the events of this host.")
@common
def show(change: str | None, host: str | None) -> None:
    """Every event of CHANGE (default: the latest), oldest first."""
    found = changes.read(changes.find(current().root, change))
    for event in found.events:
        if host and event.host != host:
            continue
        if current().json:
            words.say(words.as_json({"type": "event", **changes.event_fields(event)}))
        else:
            words.say(f"{event.seq:5}  {words.clock(event.at, day=True)}  {story.sentence(event)}")
