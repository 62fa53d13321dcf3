"""What moved between the making of a bundle and now, on this machine: time, software, inventory. Hosts: looking.py."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from gpuchange import __version__, content, inventory, once
from gpuchange.bundle import REVIEW_AGAIN, Bundle, digest_of_file, lay_out
from gpuchange.change import SSH_VARIABLES, delegates_of
from gpuchange.errors import InventoryError, StaleError
from gpuchange.frozen import is_inline
from gpuchange.plan import Plan, loads

CLOCK_SLACK = timedelta(minutes=5)


def refuse_if_stale(bundle: Bundle, root: Path, vault_ids: Sequence[str] = ()) -> list[str]:
    """Everything but the hosts. Returns what is worth knowing. Raises StaleError that says all that moved."""
    once.refuse_if_applied(root, bundle.digest)
    found, notices = inventory_moved(bundle, vault_ids)
    lines = [*expired(bundle, datetime.now(UTC)), *_software_moved(bundle), *_extra_moved(bundle), *found]
    if lines:
        raise StaleError("the bundle is stale; nothing was changed", why="\n  ".join(lines), remedy=REVIEW_AGAIN)
    return notices


def expired(bundle: Bundle, now: datetime) -> list[str]:
    """By the wall clock, on purpose: how long a review holds is people's time."""
    try:
        created, expires = (datetime.fromisoformat(at) for at in (bundle.content.created, bundle.content.expires))
        if now >= expires:
            return [f"expired since {bundle.content.expires}"]
        if now + CLOCK_SLACK < created:
            return [f"made in the future ({bundle.content.created}): a clock is wrong, here or where it was made"]
    except (ValueError, TypeError):
        return ["its times cannot be read"]
    return []


def _software_moved(bundle: Bundle) -> list[str]:
    was, now = bundle.content.playbooks, content.files(content.playbooks())
    lines = [f"playbooks/{path} {_how(was, now, path)}" for path in _unequal(was, now)]
    if bundle.content.code != content.code():
        lines.append(f"gpuchange's own code differs, though both are version {__version__}")
    return lines


def _how(was: Mapping[str, str], now: Mapping[str, str], path: str) -> str:
    return "is gone" if path not in now else "is new" if path not in was else "changed"


def _unequal(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return sorted(key for key in was.keys() | now.keys() if was.get(key) != now.get(key))


def _extra_moved(bundle: Bundle) -> list[str]:
    lines = []
    for one in bundle.content.reach.extra_vars:
        if one.file and not os.path.isfile(one.file):
            lines.append(f"-e @{one.file} is gone")
        elif one.file and digest_of_file(one.file) != one.sha256:
            lines.append(f"-e @{one.file} changed")
    return lines


def inventory_moved(bundle: Bundle, vault_ids: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """(what differs from the sources as they are now, notices). Sources that are not on this machine cannot differ:
    the bundle's own copy is applied, and the notice says so.
    """
    sources = bundle.content.inventory.sources
    absent = [source for source in sources if not is_inline(source) and not os.path.exists(source)]
    if absent:
        return [], [f"not here, so not compared; the bundle's own copy counts: {', '.join(absent)}"]
    plan = loads(bundle.content.plan, "the bundle's plan")
    with tempfile.TemporaryDirectory(prefix="gpuchange-bundle-") as scratch:
        was = resolved(bundle, plan, lay_out(bundle, Path(scratch)), vault_ids)
    try:
        now = resolved(bundle, plan, sources, vault_ids)
        return [f"inventory changed: {line}" for line in _inventories_differ(plan, was, now)], []
    except InventoryError as error:
        return [f"inventory changed: {error.what}"], []


def resolved(bundle: Bundle, plan: Plan, sources: Sequence[str], vault_ids: Sequence[str]) -> inventory.Inventory:
    return inventory.resolve(tuple(sources), bundle.content.reach.limit, plan.hosts, vault_ids=tuple(vault_ids))


def _inventories_differ(plan: Plan, was: inventory.Inventory, now: inventory.Inventory) -> Iterator[str]:
    """Hosts that came or went, variables of hosts and load balancers. Values are shown only where none is secret."""
    delegates = dict.fromkeys([*delegates_of(plan, was), *delegates_of(plan, now)])
    yield from (f"{host} is no longer among the hosts" for host in was.hosts if host not in now.hosts)
    yield from (f"{host} is new among the hosts" for host in now.hosts if host not in was.hosts)
    if list(was.hosts) != list(now.hosts) and set(was.hosts) == set(now.hosts):
        yield "the hosts stand in another order"
    for host in dict.fromkeys([*was.hosts, *delegates]):
        before, after = was.known.get(host, {}), now.known.get(host, {})
        for name in _unequal(before, after):
            yield f"{host}: {_said(name, before.get(name), after.get(name))}"


def _said(name: str, before: Any, after: Any) -> str:
    if name in SSH_VARIABLES:
        return f"{name} was {before or 'not set'}, is {after or 'not set'}"
    return f"{name} differs"
