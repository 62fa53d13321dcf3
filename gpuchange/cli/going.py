"""Verbs for a change that exists: resume, rollback, resolve, confirm, pause, abort."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gpuchange.cli import again, asking, bundles, changes, running, words
from gpuchange.cli.flags import ansible_flags, connection
from gpuchange.cli.settings import common, current
from gpuchange.errors import UsageError

NOTE_TAKEN_S = 5.0
"""A controller looks for notes every second, and may be starting plays meanwhile."""


@click.command()
@click.argument("change", required=False)
@ansible_flags
@common
def resume(change: str | None, **flags: Any) -> int:
    """Go on with CHANGE (default: the latest that is not at its end) after a crash, a pause or an answer.

    Looks before it acts. Hosts that wait only because they could not be reached are looked at again. A change whose
    preview was never agreed to shows it and asks first.
    """
    directory = changes.find(current().root, change, changes.unfinished)
    again_later = changes.command(changes.read(directory), "resume")
    return asking.carry(directory, bundles.bound(directory, connection(**flags)), again_later)


@click.command()
@click.argument("change", required=False)
@click.argument("hosts", nargs=-1)
@ansible_flags
@common
def rollback(change: str | None, hosts: tuple[str, ...], **flags: Any) -> int:
    """Take CHANGE (default: the latest that did something) back on HOSTS (default: all it has touched), with proof.

    Hosts that it has not touched yet are left as they are. Hosts not named stay where they stand.
    """
    from gpuchange import orders

    directory = changes.find(current().root, change, changes.undoable)
    if not change and not changes.undoable(directory):
        raise UsageError("no change here did anything that could be taken back", remedy=again.command("list"))
    found = changes.read(directory)
    unknown = sorted(set(hosts) - set(found.hosts))
    if unknown:
        raise UsageError(f"not in this change: {', '.join(unknown)}", remedy=again.command("status", directory.name))
    running.confirm(f"take {directory.name} back on {', '.join(hosts) or 'every host it has touched'}?")
    reach = bundles.bound(directory, connection(**flags))
    orders.rollback(directory, list(hosts) or None)
    return running.run(directory, reach, only_back=True)


ANSWERS = ("retry", "done", "undo", "leave")


@click.command()
@click.argument("change")
@click.argument("host")
@click.option("--retry", "answer", flag_value="retry", help="Look again, then go on from where it stands.")
@click.option("--done", "answer", flag_value="done", help="I made sure by hand: take the step as done.")
@click.option("--undo", "answer", flag_value="undo", help="Take this host back.")
@click.option("--leave", "answer", flag_value="leave", help="Leave this host as it stands; I take it from here.")
@common
def resolve(change: str, host: str, answer: str | None) -> None:
    """Answer for HOST of CHANGE, which waits for a human. Then: gpuchange resume CHANGE."""
    from gpuchange import orders

    if answer not in ANSWERS:
        raise UsageError("one of --retry, --done, --undo, --leave is needed", remedy="gpuchange resolve --help")
    directory = changes.find(current().root, change)
    if host not in changes.read(directory).hosts:
        raise UsageError(f"{host} is not in this change", remedy=again.command("status", directory.name))
    orders.resolve(directory, host, answer)
    words.say(f"noted: {host} {answer}\nnext: {changes.command(changes.read(directory), 'resume')}")


@click.command()
@click.argument("change")
@click.argument("host")
@common
def confirm(change: str, host: str) -> None:
    """Confirm that what HOST of CHANGE waits for was done by hand (`gpuchange status` shows what).

    A running controller hears of it at once; when none runs: gpuchange resume CHANGE.
    """
    from gpuchange import locking, orders

    directory = changes.find(current().root, change)
    found = changes.read(directory)
    if host not in found.hosts:
        raise UsageError(f"{host} is not in this change", remedy=f"its hosts: {', '.join(found.hosts)}")
    asked = found.hands.of(host)
    note = orders.confirm(directory, host, locking.user())
    for line in asked[1].lines if asked else ():
        words.say(f"confirmed for {host}: {words.clean(line)}")
    taken = note is not None and _taken(note)
    words.say(f"next: {changes.command(found, 'status' if taken else 'resume')}")


def _taken(note: Path) -> bool:
    """Whether the controller that has the journal open took the note; if it ends now, the next one takes it."""
    from gpuchange.waiting import WaitTimeout, wait_until

    try:
        return wait_until(lambda: not note.exists(), timeout=NOTE_TAKEN_S, what="the controller to hear of it")
    except WaitTimeout:
        return False


@click.command()
@click.argument("change", required=False)
@common
def pause(change: str | None) -> None:
    """Let the plays of CHANGE (default: the one under way) finish and start no more; its controller then ends."""
    from gpuchange import orders

    directory = changes.find(current().root, change, changes.alive)
    orders.pause(directory)
    found = changes.read(directory)
    look, go_on = changes.command(found, "status"), changes.command(found, "resume")
    words.say(f"{directory.name}: starts nothing more\nnext: {look}; then {go_on}")


@click.command()
@click.argument("change", required=False)
@common
def abort(change: str | None) -> None:
    """End CHANGE (default: the latest that is not at its end): hosts not yet begun are left as they are.

    Hosts in work stay in work: resume or roll them back.
    """
    from gpuchange import orders
    from gpuchange.states import Event, Kind

    directory = changes.find(current().root, change, changes.unfinished)
    found = changes.read(directory)
    idle = [name for name, host in found.state.hosts.items() if not host.touched and (host.held or not host.finished)]
    running.confirm(f"leave {len(idle)} host(s) of {directory.name} as they are, for good?")
    orders.order(directory, [Event(Kind.LEFT, host=host, data={"why": "aborted by the operator"}) for host in idle])
    words.say(f"left as they are: {', '.join(idle) or 'none'}")
    busy = [host for host in found.hosts if host not in idle and not found.state.hosts[host].finished]
    if busy:
        words.say(f"still in work: {', '.join(busy)}")
        words.say(f"next: {changes.command(found, 'resume')}, or {changes.command(found, 'rollback')}")
