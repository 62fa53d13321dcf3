"""Rules that look at more than one key of a plan. Each yields the path at fault, what is wrong and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gpuchange.plan.problems import Path

Broken = tuple[Path, str, str]


def broken(data: Mapping[str, Any]) -> Iterator[Broken]:
    """All rules over the plan's JSON data."""
    for rule in RULES:
        yield from rule(data)


def _inside(inner: str, outer: str) -> bool:
    return inner == outer or inner.startswith(outer.rstrip("/") + "/")


def _copies(data: Mapping[str, Any]) -> Iterator[tuple[Path, str, Path, str]]:
    """Every pair of a backup's source and destination, each with its path in the plan."""
    for index, entry in enumerate(data.get("backup", ())):
        target = entry.get("to")
        if isinstance(target, str):
            for number, source in enumerate(entry.get("paths", ())):
                yield ("backup", index, "paths", number), source, ("backup", index, "to"), target


def _outside_of_backup(data: Mapping[str, Any]) -> Iterator[Broken]:
    """What is left out, or may change, of what is not copied at all: a slip of the pen that would have no effect."""
    for index, entry in enumerate(data.get("backup", ())):
        for key in ("exclude", "may_change"):
            for number, path in enumerate(entry.get(key, ())):
                if not any(_inside(path, source) for source in entry.get("paths", ())):
                    where = ("backup", index, key, number)
                    yield where, f"{path} is in none of the paths", "name something below them, or leave it out"


def _nested_backup(data: Mapping[str, Any]) -> Iterator[Broken]:
    for source_path, source, target_path, target in _copies(data):
        if _inside(target, source):
            yield (
                target_path,
                f"destination {target} is inside source {source}",
                "copy to a place outside of the source",
            )
        elif _inside(source, target):
            yield (
                source_path,
                f"source {source} is inside destination {target}",
                "copy to a place outside of the source",
            )


def _recorded_backup(data: Mapping[str, Any]) -> Iterator[Broken]:
    """A copy written below a recorded path would make every later comparison fail."""
    record = data.get("record", {})
    targets = {(path, target) for _, _, path, target in _copies(data)}
    for path, target in sorted(targets, key=str):
        if any(_inside(target, left_out) for left_out in record.get("exclude", ())):
            continue
        for kept in record.get("paths", ()):
            if _inside(target, kept):
                yield (
                    path,
                    f"destination {target} is inside record.paths {kept}",
                    "copy elsewhere, or add it to record.exclude",
                )


def _sums(data: Mapping[str, Any]) -> Iterator[Broken]:
    """A checksum file is held against the hashes of what lies below record.paths."""
    record = data.get("record", {})
    rows = record.get("sums", ())
    if rows and not record.get("paths"):
        yield ("record", "sums"), "sums without paths", "name the directories of the files that they list: paths: [...]"
    files = [row.get("file") for row in rows]
    for index, file in enumerate(files):
        if file in files[:index]:
            yield ("record", "sums", index), f"{file} is listed twice", "remove one of the two"


def _repeated(data: Mapping[str, Any]) -> Iterator[Broken]:
    """A step is keyed by host, phase and provider: two entries of one provider would be one step."""
    for key in ("backup", "drain", "change"):
        names = [entry.get("provider") for entry in data.get(key, ())]
        for index, name in enumerate(names):
            if name in names[:index]:
                yield (key, index, "provider"), f"{name} is listed twice", "put both into one entry"


def _nothing_and_something(data: Mapping[str, Any]) -> Iterator[Broken]:
    names = [entry.get("provider") for entry in data.get("change", ())]
    if "none" in names and set(names) != {"none"}:
        yield ("change", names.index("none"), "provider"), "none stands beside other changes", "remove one of the two"


def _only_excluding(data: Mapping[str, Any]) -> Iterator[Broken]:
    hosts = data.get("hosts", ())
    if hosts and all(pattern.startswith(("!", "&")) for pattern in hosts):
        yield ("hosts",), "every host pattern only takes away", "name the hosts or groups to begin with"


def _repeated_text(data: Mapping[str, Any]) -> Iterator[Broken]:
    lists: list[tuple[Path, Any]] = [(("hosts",), data.get("hosts", ()))]
    lists += [
        ((key, name), data.get(key, {}).get(name, ())) for key, name in (("record", "paths"), ("record", "services"))
    ]
    lists += [(("backup", index, "paths"), row.get("paths", ())) for index, row in enumerate(data.get("backup", ()))]
    for path, values in lists:
        seen: set[str] = set()
        for index, value in enumerate(values):
            if value in seen:
                yield (*path, index), f"{value} is listed twice", "remove one of the two"
            seen.add(value)


def _metrics(data: Mapping[str, Any]) -> Iterator[Broken]:
    """A metric stands in one place of the output of a command."""
    baseline = data.get("baseline", {})
    rows, names = baseline.get("metrics", ()), [row.get("name") for row in baseline.get("metrics", ())]
    if rows and not baseline.get("command"):
        yield ("baseline", "metrics"), "metrics without a command", "say what prints them: command: [PROGRAM, ...]"
    if baseline.get("command") and not rows:
        yield ("baseline", "command"), "a command without metrics", "name what to compare: metrics: [{name, pointer}]"
    for index, row in enumerate(rows):
        path: Path = ("baseline", "metrics", index)
        if ("pointer" in row) == ("regex" in row):
            says = "has both pointer and regex" if "pointer" in row else "has neither pointer nor regex"
            yield path, f"{row.get('name')} {says}", "say with one of the two where it stands in the output"
        if row.get("name") in names[:index]:
            yield (*path, "name"), f"{row.get('name')} is listed twice", "give each metric its own name"


RULES: tuple[Callable[[Mapping[str, Any]], Iterator[Broken]], ...] = (
    _nested_backup,
    _outside_of_backup,
    _recorded_backup,
    _sums,
    _repeated,
    _nothing_and_something,
    _only_excluding,
    _repeated_text,
    _metrics,
)
