"""Hosts, groups and variables, as Ansible itself resolves them. No pattern and no inventory format is read here."""

from __future__ import annotations

import difflib
import json
import re
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuchange.addresses import bare, is_ipv6
from gpuchange.ansible_cli import ask
from gpuchange.errors import InventoryError
from gpuchange.frozen import freeze, is_inline

__all__ = ["Inventory", "freeze", "resolve", "select"]

_NO_HOSTS = "no hosts to target"


@dataclass(frozen=True)
class Inventory:
    """`hosts`: the chosen hosts, in the plan's order, with their variables (inline vault values stay encrypted).

    `known`: every host of the inventory with its variables; `groups`: all members of every group, children's included.
    """

    hosts: Mapping[str, Mapping[str, Any]]
    groups: Mapping[str, tuple[str, ...]]
    known: Mapping[str, Mapping[str, Any]]

    def address(self, host: str) -> str:
        """What `host` is reached by: its ansible_host, or its name."""
        return str(self.known[host].get("ansible_host", host))


def resolve(
    sources: Sequence[str],
    limit: str | None,
    hosts: Sequence[str],
    vault_ids: Sequence[str] = (),
    extra: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Inventory:
    """The hosts that the patterns `hosts` name in `sources`, cut down to `limit`.

    `sources`, `limit`, `vault_ids` are what Ansible's -i, -l and --vault-id take; `extra` goes to ansible-inventory
    as it is. Without sources, Ansible's own default inventory is used. Sources are evaluated once.
    Raises InventoryError: unreadable inventory, a pattern or limit that names nothing, a dangerous name or address.
    """
    listing = _listing(sources, vault_ids, extra, env)
    known, groups = _known(listing), _groups(listing)
    shown = ", ".join(sources) or "the default inventory"
    chosen = _chosen(listing, known, groups, hosts, limit, shown, env)
    for host in chosen:
        _check_host(host, known[host], shown)
    return Inventory({host: known[host] for host in chosen}, groups, known)


def select(
    inventory: Inventory, patterns: Sequence[str], limit: str | None = None, env: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """More hosts of a resolved inventory, such as the load balancers that a drain names. Raises InventoryError."""
    listing = {name: {"hosts": list(members)} for name, members in inventory.groups.items()}
    found = _chosen(listing, inventory.known, inventory.groups, patterns, limit, "the inventory", env)
    for host in found:
        _check_host(host, inventory.known[host], "the inventory")
    return found


def _listing(
    sources: Sequence[str], vault_ids: Sequence[str], extra: Sequence[str], env: Mapping[str, str] | None
) -> dict[str, Any]:
    for source in sources:
        if not is_inline(source) and not Path(source).exists():
            remedy = "name an inventory file or directory with -i, or hosts as in -i gpu-01,"
            raise InventoryError(f"the inventory {source} does not exist", remedy=remedy)
    arguments = ["--list", *(f"--inventory={source}" for source in sources)]
    arguments += [f"--vault-id={vault}" for vault in vault_ids] + list(extra)
    asks = any(vault.rpartition("@")[2].startswith("prompt") for vault in vault_ids)
    try:
        out, _ = ask("inventory", arguments, env=env, terminal=asks)
        return dict(json.loads(out))
    except InventoryError as error:
        error.where = error.where or ", ".join(sources)
        raise
    except ValueError:
        raise InventoryError("ansible-inventory gave no JSON", where=", ".join(sources), why=out[:200]) from None


def _known(listing: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    variables = listing.get("_meta", {}).get("hostvars", {})
    names = [name for group in listing.values() for name in group.get("hosts", ())]
    return {name: variables.get(name, {}) for name in dict.fromkeys([*names, *variables])}


def _groups(listing: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Members of every group, children's included. Empty groups are listed too, though Ansible leaves them out."""
    names = {name for name in listing if name != "_meta"}
    names |= {child for group in listing.values() for child in group.get("children", ())}
    return {name: tuple(dict.fromkeys(_members(listing, name))) for name in sorted(names)}


def _members(listing: Mapping[str, Any], name: str) -> Iterable[str]:
    """Hosts level by level, as Ansible orders them: the group's own, its children's, their children's."""
    level, seen = [name], {name}
    while level:
        groups = [listing.get(group, {}) for group in level]
        for group in groups:
            yield from group.get("hosts", ())
        below = dict.fromkeys(child for group in groups for child in group.get("children", ()))
        level = [child for child in below if child not in seen]
        seen.update(level)


def _chosen(
    listing: Mapping[str, Any],
    known: Mapping[str, Any],
    groups: Mapping[str, tuple[str, ...]],
    patterns: Sequence[str],
    limit: str | None,
    shown: str,
    env: Mapping[str, str] | None,
) -> tuple[str, ...]:
    pieces = [piece for pattern in patterns for piece in split_pattern(pattern)]
    empty = [piece for piece in pieces if groups.get(piece) == () and piece not in known]
    if empty:
        raise InventoryError(
            f"the group {empty[0]} has no hosts", where=shown, remedy="put hosts into it, or name another"
        )
    exact = None if limit else exact_names(pieces, known, groups)
    names, unmatched = (exact, ()) if exact else _matched(listing, ",".join(pieces), limit, env)
    if unmatched:
        raise _not_there(unmatched, {piece.lstrip("!&") for piece in pieces}, [*known, *groups], shown)
    implicit = [name for name in names if name not in known]
    if implicit:
        raise InventoryError(
            f"{implicit[0]} is not in the inventory",
            where=shown,
            why="Ansible offers the controller itself under this name",
            remedy="name GPU hosts, or add the controller to the inventory if it is one",
        )
    if not names:
        both = f"{', '.join(patterns)}" + (f" with --limit {limit}" if limit else "")
        raise InventoryError(f"{both} names no host", where=shown, remedy="check the hosts of the plan and --limit")
    return names


def exact_names(
    pieces: Sequence[str], known: Mapping[str, Any], groups: Mapping[str, tuple[str, ...]]
) -> tuple[str, ...] | None:
    """Hosts of plain host and group names, for which Ansible need not be started; None if any is more than that."""
    if not all(
        re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]*", piece) and (piece in groups or piece in known) for piece in pieces
    ):
        return None
    return tuple(dict.fromkeys(host for piece in pieces for host in groups.get(piece, (piece,))))


def _matched(
    listing: Mapping[str, Any], pattern: str, limit: str | None, env: Mapping[str, str] | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Ask Ansible which hosts `pattern` and `limit` leave, and which parts of them match nothing."""
    with tempfile.TemporaryDirectory(prefix="gpuchange-") as directory:
        bare = Path(directory, "hosts.json")
        bare.write_text(json.dumps(_names_only(listing)), encoding="utf-8")
        arguments = ["--list-hosts", f"--inventory={bare}", *([f"--limit={limit}"] if limit else []), "--", pattern]
        try:
            out, err = ask("adhoc", arguments, env=env)
        except InventoryError as error:
            if _NO_HOSTS not in error.why:
                raise
            out, err = "", error.why
    names = tuple(line.strip() for line in out.splitlines() if line.startswith("    "))
    unmatched = re.findall(r"Could not match supplied host pattern, ignoring:\s+([^\s;]+)", err)
    return names, tuple(dict.fromkeys(unmatched))


def _names_only(listing: Mapping[str, Any]) -> dict[str, Any]:
    """The groups of a listing without variables, in the form of a YAML inventory."""
    return {
        name: {
            "hosts": {host: {} for host in group.get("hosts", ())},
            "children": {child: {} for child in group.get("children", ())},
        }
        for name, group in listing.items()
        if name != "_meta"
    }


def split_pattern(pattern: str) -> list[str]:
    """One entry of a list of patterns, cut where Ansible cuts it: at commas, else at colons outside brackets."""
    if "," in pattern:
        return [piece for part in pattern.split(",") if (piece := part.strip())]
    if is_ipv6(pattern.lstrip("!&")):
        return [pattern]
    return re.findall(r"(?:[^\s:\[\]]|\[[^\]]*\])+", pattern)


def _not_there(unmatched: Sequence[str], planned: Collection[str], known: Iterable[str], shown: str) -> InventoryError:
    names = list(known)
    lines = []
    for word in unmatched:
        close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
        meant = f" (did you mean {close[0]}?)" if close else ""
        lines.append(f"{'plan' if word in planned else '--limit'} names {word}, not in inventory{meant}")
    remedy = "mend the name, or add the host to the inventory"
    return InventoryError("; ".join(lines), where=shown, remedy=remedy)


def _check_host(host: str, variables: Mapping[str, Any], shown: str) -> None:
    fault = _bad_word(host) or ("holds a slash" if "/" in host or host in (".", "..") else "")
    if fault:
        raise InventoryError(f"the host name {host!r} {fault}", where=shown, remedy="rename the host in the inventory")
    for name in (
        "ansible_host",
        "ansible_ssh_host",
        "ansible_user",
        "ansible_ssh_user",
        "ansible_port",
        "ansible_ssh_port",
    ):
        value = variables.get(name)
        if isinstance(value, str | int) and "{{" not in str(value):
            fault = _bad_word(str(value)) or _bad_port(name, value) or _bad_brackets(str(value))
            if fault:
                remedy = "write the bare address, user or port; ssh options belong into ansible_ssh_common_args"
                raise InventoryError(f"{name} of {host}, {str(value)!r}, {fault}", where=shown, remedy=remedy)


def _bad_word(text: str) -> str:
    if not text:
        return "is empty"
    if text.startswith("-"):
        return "begins with a dash: ssh would read it as an option"
    if any(char.isspace() or not char.isprintable() for char in text):
        return "holds a blank or a control character"
    return ""


def _bad_brackets(text: str) -> str:
    return (
        f"stands in brackets, which ssh takes for a part of the name: write {bare(text)}"
        if text.startswith("[")
        else ""
    )


def _bad_port(name: str, value: str | int) -> str:
    if not name.endswith("port") or (str(value).isdecimal() and 0 < int(str(value)[:6]) < 65536):
        return ""
    return "is not a port from 1 to 65535"
