"""The verb unlock: whose is a host, and shutting a dead or stopped controller out of it."""

from __future__ import annotations

import os
import re
import secrets
import select
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpuchange.cli import again, running, words
from gpuchange.cli.flags import ansible_flags, connection
from gpuchange.cli.settings import common
from gpuchange.errors import LockedError, UnreachableError, UsageError

if TYPE_CHECKING:
    from gpuchange.change import Connection
    from gpuchange.reports import Evidence

ROLE = "owner_marker"


# A lock is <change>/<fence>: each controller of a change has a higher fence than those before it, so an id that was
# read before another controller took over opens nothing.
LOCK_ID = re.compile(r"(\?|[A-Za-z0-9][A-Za-z0-9._-]{0,79})/([0-9]+)")
HEAD = ("HOST", "LOCK_ID", "CONTROLLER", "SINCE", "REASON")


@dataclass(frozen=True)
class Lock:
    """One owner marker: of a host, or of one server on a balancer."""

    host: str
    server: str
    marker: Mapping[str, Any]

    @property
    def change(self) -> str:
        return str(self.marker.get("change", "?"))

    @property
    def fence(self) -> int:
        return int(self.marker.get("fence") or 0)

    @property
    def row(self) -> tuple[str, ...]:
        where = f"{self.host}: {self.server}" if self.server else self.host
        since, reason = (str(self.marker.get(key) or "-") for key in ("since", "reason"))
        return where, f"{self.change}/{self.fence}", self._controller(), since, reason

    def _controller(self) -> str:
        machine, pid = (*str(self.marker.get("controller", "")).split(":"), "")[:2]
        user, boot = (str(self.marker.get(key) or "?") for key in ("user", "boot"))
        return str(self.marker.get("damaged") or f"process {pid} of {user} on {machine} (boot {boot})")


@click.command()
@click.argument("named", metavar="[LOCK_ID] [HOST...]", nargs=-1)
@ansible_flags
@common
def unlock(named: tuple[str, ...], **flags: Any) -> int:
    """Show which change holds HOSTs (default: every host of the inventory); with LOCK_ID, open that lock.

    Controllers up to that one are shut out of these hosts from then on, also one that was only stopped and comes back.
    Name the balancers too: they keep a lock for each server.
    """
    wanted = LOCK_ID.fullmatch(named[0]) if named else None
    reach = connection(**flags)
    names = _hosts(named[1:] if wanted else named, reach)
    found, gone = _reported(_play(names, reach, "probe", {}), "the locks cannot be read")
    locks = [lock for item in found for lock in _locks(item)]
    words.say(words.table(HEAD, [lock.row for lock in locks]) if locks else "no host here is locked")
    for host, why in gone.items():
        words.warn(f"{words.clean(host)}: unreachable, not seen: {words.clean(why)}")
    if wanted:
        _expect(locks, wanted[1], int(wanted[2]))
        _open(tuple(item.host for item in found), reach, wanted[1], int(wanted[2]))
    elif locks:
        for line in _openings(locks):
            words.say(line)
    return UnreachableError.exit_code if gone else LockedError.exit_code if locks and not wanted else 0


def _locks(item: Any) -> list[Lock]:
    marker, things = item.report.get("marker"), item.report.get("things") or {}
    return [Lock(item.host, name, at) for name, at in {**({"": marker} if marker else {}), **things}.items()]


def _openings(locks: Sequence[Lock]) -> list[str]:
    """Per change the command that opens its locks: the newest id, and every host that has one."""
    newest = {lock.change: lock.fence for lock in sorted(locks, key=lambda lock: lock.fence)}
    hosts = {change: dict.fromkeys(lock.host for lock in locks if lock.change == change) for change in newest}
    return [
        f"next: when that controller is gone for good: "
        f"{again.command('unlock', words.clean(f'{change}/{fence}'), *map(words.clean, hosts[change]))}"
        for change, fence in newest.items()
    ]


def _expect(locks: Sequence[Lock], change: str, fence: int) -> None:
    """The id must be that of the newest lock that the change has here. Raises UsageError."""
    newest = max((lock.fence for lock in locks if lock.change == change), default=None)
    if newest is None:
        raise UsageError(
            f"no lock {change}/{fence} is held here", remedy=f"take a LOCK_ID from: {again.command('unlock')}"
        )
    if newest != fence:
        raise UsageError(
            f"no lock {change}/{fence} is held here; {change} holds {change}/{newest}",
            why="another controller of it was at work since that id was shown" if newest > fence else "",
            remedy="make sure that this one is gone too, then give its LOCK_ID",
        )


def _open(hosts: Sequence[str], reach: Connection, change: str, fence: int) -> None:
    running.confirm(f"shut the controllers of {change} up to {fence} out of {', '.join(hosts)}?")
    opened, gone = _reported(
        _play(hosts, reach, "apply", {"expect": {"change": change, "fence": fence}}), "not unlocked"
    )
    words.say(f"unlocked: {words.clean(', '.join(item.host for item in opened if item.report.get('released')))}")
    words.say(f"shut out: controllers of {words.clean(change)} up to {fence}, on {len(opened)} hosts")
    if gone:
        raise UnreachableError(
            "not unlocked everywhere", where=", ".join(gone), remedy="unlock again when they are back"
        )


def _hosts(patterns: Sequence[str], reach: Connection) -> tuple[str, ...]:
    from gpuchange import inventory

    if not reach.inventory:
        raise UsageError("no inventory is named", remedy="give one with -i")
    return tuple(inventory.resolve(reach.inventory, reach.limit, patterns or ("all",), vault_ids=reach.vault_ids).hosts)


def _play(hosts: Sequence[str], reach: Connection, tasks: str, args: Mapping[str, Any]) -> list[Evidence]:
    """Plays the owner role once on `hosts`."""
    from gpuchange import content
    from gpuchange.player import Play, Request

    name = f"unlock-{secrets.token_hex(4)}"
    owner = {"change": name, "controller": f"{os.uname().nodename}:{os.getpid()}", "fence": 0}
    request = Request(
        attempt=f"{name}/1",
        playbook=content.playbooks() / content.PLAYBOOK,
        role=ROLE,
        tasks=tasks,
        hosts=tuple(hosts),
        inventory=tuple(os.path.abspath(s) if os.path.exists(s) else s for s in reach.inventory),
        host_args={host: args for host in hosts},
        shared={
            "gpuchange_owner": owner,
            "gpuchange_step": {"phase": "owner", "provider": "marker", "direction": "do"},
        },
        cmdline=reach.cmdline(),
        become_password=reach.become_password,
        forks=reach.forks,
        verbosity=reach.verbosity,
    )
    found: list[Evidence] = []
    with tempfile.TemporaryDirectory(prefix="gpuchange-unlock-") as logs:
        play = Play(request, Path(logs))
        while not play.ended:
            select.select([play], [], [])
            found += play.evidence()
    return found


def _reported(found: Sequence[Evidence], what: str) -> tuple[list[Any], dict[str, str]]:
    """The reports, and {host: why} of those that cannot be reached. Raises LockedError for what failed on a host."""
    from gpuchange.reports import Reported, Unreachable

    for item in found:
        if not isinstance(item, (Reported, Unreachable)):
            raise LockedError(what, where=item.host, why=item.why, remedy=_remedy(item))
    reported = [item for item in found if isinstance(item, Reported)]
    return reported, {item.host: item.why for item in found if isinstance(item, Unreachable)}


def _remedy(item: Any) -> str:
    kind = (getattr(item, "refused", None) or {}).get("kind")
    return {
        "working": "wait until that work has ended, or end it there (systemctl stop UNIT); then unlock again",
        "stale": f"look again: {again.command('unlock')}",
    }.get(str(kind), "see: ssh there")
