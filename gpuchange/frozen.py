"""A change keeps the inventory that it began with: sources are copied, dynamic ones as what they answered."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpuchange import clear_secrets
from gpuchange.ansible_cli import ask, environment, run
from gpuchange.errors import InventoryError

_BESIDE = ("group_vars", "host_vars")
_LEFT_OUT = {".git", ".svn", "__pycache__"}
_PLUGIN = re.compile(rb"^plugin:\s*['\"]?([A-Za-z0-9_.]+)", re.MULTILINE)
_STATIC_PLUGINS = {b"constructed", b"ansible.builtin.constructed"}  # computed from the other sources: stays a rule


def is_inline(source: str) -> bool:
    """Whether an -i argument lists hosts itself (`-i gpu-01,gpu-02`)."""
    return "," in source and not os.path.exists(source)


def freeze(sources: Sequence[str], dest: Path, env: Mapping[str, str] | None = None) -> list[str]:
    """Copy the inventory `sources` below `dest` (created; files 0600) and return the new -i paths.

    group_vars and host_vars beside a source come along. Scripts and plugin configurations are replaced by the hosts
    that they give now. Vault-encrypted files and values stay encrypted. Without sources: Ansible's default ones.
    Raises InventoryError.
    """
    try:
        dest.mkdir(mode=0o700, parents=True, exist_ok=True)
        places: dict[Path, Path] = {}
        kept = [_one(source, dest, places, env) for source in (sources or default_sources(env))]
        for origin, place in places.items():
            for name in _BESIDE:
                _copy_tree(origin / name, place / name, env, vars_only=True)
    except (OSError, shutil.Error) as error:
        raise InventoryError("the inventory cannot be copied", why=str(error)[:400]) from None
    return [str(path) for path in kept]


def default_sources(env: Mapping[str, str] | None = None) -> list[str]:
    """The inventory that Ansible uses when none is named."""
    out, _ = ask("config", ["dump", "--format", "json", "--type", "base"], env=env)
    settings = {row.get("name"): row.get("value") for row in json.loads(out)}
    found = [str(path) for path in settings.get("DEFAULT_HOST_LIST") or ()]
    return [path for path in found if is_inline(path) or os.path.exists(path)]


def _one(source: str, dest: Path, places: dict[Path, Path], env: Mapping[str, str] | None) -> Path:
    if is_inline(source):
        names = [name for part in source.split(",") if (name := part.strip())]
        return _write(
            dest / f"inline-{len(list(dest.iterdir()))}.json", {"all": {"hosts": {name: {} for name in names}}}
        )
    path = Path(source).absolute()
    if path.is_dir():
        return _copy_tree(path, dest / f"{len(list(dest.iterdir()))}-{path.name}", env)
    place = places.setdefault(path.parent, dest / str(len(list(dest.iterdir()))))
    place.mkdir(mode=0o700, exist_ok=True)
    return _copy_source(path, place, env)


def _copy_tree(origin: Path, place: Path, env: Mapping[str, str] | None, vars_only: bool = False) -> Path:
    if not origin.exists():
        return place
    if origin.is_file():  # group_vars may be one file as well
        return _copy_file(origin, place)
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    for entry in sorted(origin.iterdir()):
        if entry.is_dir() and entry.name not in _LEFT_OUT:
            _copy_tree(entry, place / entry.name, env, vars_only or entry.name in _BESIDE)
        elif entry.is_file():
            if vars_only:
                _copy_file(entry, place / entry.name)
            else:
                _copy_source(entry, place, env)
    return place


def _copy_source(path: Path, place: Path, env: Mapping[str, str] | None) -> Path:
    head = path.read_bytes()[:65536]
    if os.access(path, os.X_OK) and head.startswith((b"#!", b"\x7fELF")):
        return _write(place / f"{path.name}.json", _without_secrets(path, _from_script(path, env)))
    plugin = _PLUGIN.search(head) if path.suffix in (".yml", ".yaml") else None
    if plugin and plugin[1] not in _STATIC_PLUGINS:
        return _write(place / f"{path.stem}.json", _without_secrets(path, _from_plugin(path, place, env)))
    return _copy_file(path, place / path.name)


def _copy_file(origin: Path, place: Path) -> Path:
    _refuse_secrets(origin, origin.read_text(encoding="utf-8", errors="replace"))
    shutil.copyfile(origin, place)
    place.chmod(0o600)
    return place


def _refuse_secrets(origin: Path, text: str) -> None:
    """The copy is kept: what it holds must be references. Raises InventoryError with file:line."""
    found = [f"line {line}: {name}" for line, name in clear_secrets.in_variables(text)]
    if found:
        raise InventoryError(
            f"the inventory holds secrets in clear: {', '.join(found[:5])}",
            where=f"{origin}:{found[0].split(':')[0].removeprefix('line ')}",
            why="a change keeps a copy of its inventory",
            remedy="encrypt the values (ansible-vault encrypt_string) or the file, and give --vault-id; or use -K",
        )


def _without_secrets(origin: Path, listing: dict[str, Any]) -> dict[str, Any]:
    """What a script or plugin answered, if no variable in it is a secret in clear. Raises InventoryError."""
    names = sorted(set(_clear(listing)))
    if names:
        raise InventoryError(
            f"the inventory gives secrets in clear: {', '.join(names[:5])}",
            where=str(origin),
            why="a change keeps what its inventory answered",
            remedy="let it give vault values or lookups, or keep them in an encrypted group_vars file beside it",
        )
    return listing


def _clear(data: Any) -> Iterator[str]:
    for key, value in data.items() if isinstance(data, Mapping) else ():
        if isinstance(value, str) and clear_secrets.names_one(str(key)) and not clear_secrets.is_reference(value):
            yield str(key)
        else:
            yield from _clear(value)


def _write(path: Path, data: Mapping[str, Any]) -> Path:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        json.dump(data, file, indent=1)
    return path


def _from_script(path: Path, env: Mapping[str, str] | None) -> dict[str, Any]:
    listing = _script_json(path, ["--list"], env)
    if "_meta" not in listing:
        names = dict.fromkeys(name for group in listing.values() for name in _hosts_of(group))
        listing["_meta"] = {"hostvars": {name: _script_json(path, ["--host", name], env) for name in names}}
    return as_yaml_inventory(listing)


def _script_json(path: Path, arguments: Sequence[str], env: Mapping[str, str] | None) -> dict[str, Any]:
    out, _ = run([str(path), *arguments], what=f"the inventory script {path}", env=environment(env))
    try:
        return dict(json.loads(out or "{}"))
    except (ValueError, TypeError):
        raise InventoryError(f"the inventory script {path} gave no JSON", remedy=f"run it: {path} --list") from None


def _from_plugin(path: Path, place: Path, env: Mapping[str, str] | None) -> dict[str, Any]:
    """Ask Ansible for what the plugin gives, away from group_vars: those are copied, not resolved."""
    alone = place / f".{path.name}.d"
    alone.mkdir(mode=0o700)
    try:
        copy = _copy_file(path, alone / path.name)
        out, _ = ask("inventory", ["--list", "--export", f"--inventory={copy}"], env=env)
    finally:
        shutil.rmtree(alone, ignore_errors=True)
    return as_yaml_inventory(json.loads(out))


def _hosts_of(group: Any) -> Iterator[str]:
    yield from group if isinstance(group, list) else group.get("hosts", ())


def as_yaml_inventory(listing: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON of an inventory script in the form that Ansible reads from a file."""
    found: dict[str, Any] = {"all": {"hosts": dict(listing.get("_meta", {}).get("hostvars", {}))}}
    for name, group in listing.items():
        if name == "_meta":
            continue
        parts = {} if isinstance(group, list) else group
        entry = found.setdefault(name, {})
        entry.setdefault("hosts", {}).update({host: {} for host in _hosts_of(group) if host not in entry["hosts"]})
        entry["children"] = {child: {} for child in parts.get("children", ())}
        entry["vars"] = dict(parts.get("vars", {}))
    return found
