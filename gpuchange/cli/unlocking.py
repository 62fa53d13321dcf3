"""The verb unlock: whose is a host, and taking a dead controller's marker away from it."""

from __future__ import annotations

import os
import secrets
import select
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpuchange.cli import running, words
from gpuchange.cli.flags import ansible_flags, connection
from gpuchange.cli.settings import common
from gpuchange.errors import LockedError, UnreachableError, UsageError

if TYPE_CHECKING:
    from gpuchange.change import Connection
    from gpuchange.reports import Evidence

ROLE = "owner_marker"


@click.command()
@click.argument("hosts", nargs=-1, required=True)
@click.option("--change", metavar="ID", help="Take the marker of this change away; without it, only show whose it is.")
@ansible_flags
@common
def unlock(hosts: tuple[str, ...], change: str | None, **flags: Any) -> int:
    """Show which change owns HOSTS; with --change ID, take that change's owner markers away.

    Make sure first that its controller is gone for good: it would act on the hosts beside the next one.
    """
    reach = connection(**flags)
    names = _hosts(hosts, reach)
    owners = {item.host: item.report.get("marker") or {} for item in _reported(_play(names, reach, "probe", {}))}
    words.say(words.table(("HOST", "OWNED BY CHANGE", "CONTROLLER", "FENCE"), [_row(*pair) for pair in owners.items()]))
    owned = [host for host, marker in owners.items() if marker]
    if not owned:
        return 0
    if change is None:
        words.say(f"next: gpuchange unlock {' '.join(owned)} --change {words.clean(owners[owned[0]].get('change'))}")
        return LockedError.exit_code
    ours = [host for host in owned if owners[host].get("change") == change]
    if not ours:
        raise UsageError(f"none of these hosts is owned by {change}", remedy="give --change as shown above")
    running.confirm(f"take the marker of {change} away from {', '.join(ours)}?")
    _reported(_play(ours, reach, "apply", {"expect": {"change": change}}))
    words.say(f"unlocked: {words.clean(', '.join(ours))}")
    return 0


def _row(host: str, marker: Mapping[str, Any]) -> tuple[str, str, str, str]:
    change, controller, fence = (str(marker.get(key, "-")) for key in ("change", "controller", "fence"))
    return host, change, controller, fence


def _hosts(patterns: Sequence[str], reach: Connection) -> tuple[str, ...]:
    from gpuchange import inventory

    if not reach.inventory:
        raise UsageError("no inventory is named", remedy="give one with -i")
    return tuple(inventory.resolve(reach.inventory, reach.limit, patterns, vault_ids=reach.vault_ids).hosts)


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


def _reported(found: Sequence[Evidence]) -> list[Any]:
    from gpuchange.reports import Reported, Unreachable

    for item in found:
        if isinstance(item, Unreachable):
            raise UnreachableError("the host cannot be reached", where=item.host, why=item.why, remedy="see: ssh there")
        if not isinstance(item, Reported):
            raise LockedError("the marker cannot be read or taken away", where=item.host, why=item.why)
    return list(found)
