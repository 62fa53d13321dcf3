"""Hash manifests as streams: read in their order, compared in bounded memory. Standard library only.

A manifest has one JSON entry a line, in depth-first order of the names as bytes. Its keys:
  path (bytes that are no UTF-8 as lone surrogates), kind, mode, uid, gid, mtime_ns, ctime_ns, ino, and as they apply
  size, nlink, sha256, target, rdev, xattr; error (EIO, ...) or busy (it changed while it was read) instead of a hash.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import IO, Any, Dict, List, Optional, Tuple

SHOWN = 20  # names kept for each kind of difference

Entry = Dict[str, Any]
Key = Tuple[bytes, ...]
CONTENT = ("kind", "sha256", "target", "size", "rdev")
UNMOVED = ("kind", "size", "mtime_ns", "ctime_ns", "ino")
SAME_VERSION = ("kind", "size", "mtime_ns")
METADATA = ("mode", "uid", "gid", "mtime_ns", "xattr", "nlink")


def to_text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def to_bytes(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


def key_of(path: bytes) -> Key:
    return tuple(path.rstrip(b"/").split(b"/"))


class Reader:
    """A manifest read forward only, in its order. A torn last line (power cut) ends it."""

    def __init__(self, path: str) -> None:
        self.file: Optional[IO[bytes]] = None
        with contextlib.suppress(FileNotFoundError):
            self.file = open(path, "rb")  # noqa: SIM115
        self.key: Optional[Key] = None
        self.entry: Entry = {}
        self.step()

    def step(self) -> None:
        self.key, self.entry = None, {}
        line = self.file.readline() if self.file else b""
        if line.endswith(b"\n"):
            with contextlib.suppress(ValueError, KeyError, AttributeError):
                self.entry = json.loads(line)
                self.key = key_of(to_bytes(self.entry["path"]))

    def at(self, key: Key) -> Optional[Entry]:
        """The entry of this key. Keys must be asked for in ascending order."""
        while self.key is not None and self.key < key:
            self.step()
        return self.entry if self.key == key else None

    def all_at(self, key: Key) -> List[Entry]:
        """Every entry of this key, where a key may come several times. Ask in ascending order."""
        found = []
        while self.at(key) is not None:
            found.append(self.entry)
            self.step()
        return found

    def close(self) -> None:
        if self.file:
            self.file.close()


def lay_over(newer: str, older: str) -> None:
    """Make one interrupted manifest of two: all that `newer` holds, then what `older` holds beyond it.

    The result is at `older`. Whatever interrupts this, both are there or the result is.
    """
    one, two = Reader(newer), Reader(older)
    with open(older + ".new", "wb") as out:
        last: Key = ()
        while one.key is not None:
            last = one.key
            out.write(json.dumps(one.entry).encode() + b"\n")
            one.step()
        while two.key is not None:
            if two.key > last:
                out.write(json.dumps(two.entry).encode() + b"\n")
            two.step()
    one.close()
    two.close()
    os.replace(older + ".new", older)
    os.unlink(newer)


def compare(expected: str, found: str, ignore: Tuple[str, ...] = (), before: str = "") -> Dict[str, Any]:
    """Differences of two manifests: counts and first names of mismatch, missing, extra, metadata, unreadable.

    `ignore`: metadata left out. `damaged`: [name, hash expected, hash found] of what differs though size and time are
    equal and, with an earlier manifest of what was `expected`, of what differs or is missing though that had not moved.
    """
    result: Dict[str, Any] = {"checked": 0, "expected": 0, "equal": 0, "damaged": []}
    metadata = tuple(name for name in METADATA if name not in ignore)
    names: Dict[str, List[str]] = {kind: [] for kind in ("mismatch", "missing", "extra", "metadata", "unreadable")}
    counts = dict.fromkeys(names, 0)
    one, two, was = Reader(expected), Reader(found), Reader(before or os.devnull)
    while one.key is not None or two.key is not None:
        kind, entry = _difference(one, two, metadata)
        result["expected"] += one.key is not None and kind != "extra"
        result["checked"] += kind in ("", "mismatch", "metadata")
        result["equal"] += kind == ""
        silent = kind == "mismatch" and all(one.entry.get(key) == entry.get(key) for key in SAME_VERSION)
        if silent or (kind in ("mismatch", "missing") and _steady(was, one)):
            other = entry.get("sha256") if kind == "mismatch" else None
            result["damaged"] += [[entry["path"], one.entry.get("sha256"), other]][: SHOWN - len(result["damaged"])]
        if kind:
            counts[kind] += 1
            if len(names[kind]) < SHOWN:
                names[kind].append(entry["path"])
        _advance(one, two, kind)
    for reader in (one, two, was):
        reader.close()
    return dict(result, **counts, names={kind: shown for kind, shown in names.items() if shown})


def _steady(was: Reader, one: Reader) -> bool:
    """Whether the entry of `one` is the very file that it was in the earlier manifest."""
    old = was.at(one.key) if one.key is not None else None
    return old is not None and all(old.get(name) == one.entry.get(name) for name in UNMOVED)


def _difference(one: Reader, two: Reader, metadata: Tuple[str, ...]) -> Tuple[str, Entry]:
    if two.key is None or (one.key is not None and one.key < two.key):
        return "missing", one.entry
    if one.key is None or two.key < one.key:
        return "extra", two.entry
    if two.entry.get("error") or two.entry.get("busy") or one.entry.get("error") or one.entry.get("busy"):
        return "unreadable", two.entry
    if any(one.entry.get(name) != two.entry.get(name) for name in CONTENT):
        return "mismatch", two.entry
    if any(one.entry.get(name) != two.entry.get(name) for name in metadata):
        return "metadata", two.entry
    return "", two.entry


def _advance(one: Reader, two: Reader, kind: str) -> None:
    if kind != "extra":
        one.step()
    if kind != "missing":
        two.step()
