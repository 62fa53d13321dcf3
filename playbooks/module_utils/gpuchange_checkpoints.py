"""Whether checkpoints are whole: their shards are there, none is unlisted, sizes are what they say. Reads heads only.

safetensors (header against file size), Hugging Face indexes (*.safetensors.index.json, *.bin.index.json), torch
distributed checkpoints (.metadata beside __N_M.distcp) and torch archives. No pickle is executed, memory is bounded.
Standard library only.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

try:
    from ansible.module_utils import gpuchange_json_stream as json_stream
    from ansible.module_utils import gpuchange_pickle_look as pickle_look
except ImportError:  # a program now: its copies lie beside it
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import gpuchange_json_stream as json_stream  # type: ignore[import-not-found,no-redef]
    import gpuchange_pickle_look as pickle_look  # type: ignore[import-not-found,no-redef]

INDEX = re.compile(r".+\.(safetensors|bin)\.index(\.[\w-]+)?\.json")
SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)((?:\.[\w-]+)?\.(?:safetensors|bin))")
DISTCP = re.compile(r"__\d+_\d+\.distcp")
ARCHIVE = re.compile(r".+\.(pt|pth|bin|ckpt)")
STORED = frozenset(("relative_path", "offset", "length"))
MOST_HEADER = 100 * 1000 * 1000  # the format's own limit
MOST_INDEX = 1024 * 1024 * 1024
MOST_SHARDS = 20000
ZIP_END = 65557


class Broken(Exception):
    """What is wrong with a file, without its name."""


class Tree:
    """The recorded directories. A link is followed to files inside of them only."""

    def __init__(self, roots: List[str]) -> None:
        self.roots = [os.path.realpath(root).rstrip("/") + "/" for root in roots]

    def open(self, path: str) -> Optional[Tuple[int, int]]:
        """(handle, size) of a regular file; None when it lies outside. Raises Broken, FileNotFoundError."""
        real = os.path.realpath(path)
        if not (real + "/").startswith(tuple(self.roots)):
            return None
        try:
            handle = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise Broken("cannot be opened: %s" % error.strerror) from error
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            os.close(handle)
            raise Broken("is no file")
        return handle, status.st_size

    def look(self, path: str, reader: Callable[[int, int], Any]) -> Any:
        """What `reader(handle, size)` says of the file; None when it lies outside. Raises Broken."""
        try:
            opened = self.open(path)
        except FileNotFoundError:
            raise Broken("is a link to nothing" if os.path.islink(path) else "is not there") from None
        if opened is None:
            return None
        try:
            return reader(*opened)
        except OSError as error:
            raise Broken("cannot be read: %s" % error.strerror) from error
        finally:
            os.close(opened[0])


def _reading(handle: int, begin: int, end: int) -> Callable[[int], bytes]:
    """read(n) over a part of a file."""
    at = [begin]

    def read(count: int) -> bytes:
        piece = os.pread(handle, max(0, min(count, end - at[0])), at[0])
        at[0] += len(piece)
        return piece

    return read


# ------------------------------------------------------------------------------------------- safetensors


def safetensors(handle: int, size: int) -> Tuple[int, int]:
    """(tensors, bytes of tensors) of a whole file. Raises Broken."""
    head = os.pread(handle, 8, 0)
    if len(head) < 8:
        raise Broken("is cut: it ends within its first 8 bytes")
    length = int.from_bytes(head, "little")
    if length > MOST_HEADER:
        raise Broken("is no safetensors file: a header of %d bytes" % length)
    if 8 + length > size:
        raise Broken("is cut within its header: %d bytes, the header alone ends at %d" % (size, 8 + length))
    try:
        tensors, held, end = _offsets(_reading(handle, 8, 8 + length))
    except ValueError as error:
        raise Broken("has a header that cannot be read: %s" % error) from error
    if 8 + length + end != size:
        raise Broken("has %d bytes, its header says %d" % (size, 8 + length + end))
    if held != end:
        raise Broken("has tensors that overlap or leave gaps: %d bytes in %d" % (held, end))
    return tensors, held


def _offsets(read: Callable[[int], bytes]) -> Tuple[int, int, int]:
    """(tensors, bytes of all, end of the last) by a header. Raises ValueError."""
    tensors, held, end = 0, 0, 0
    for where, value in json_stream.scalars(read):
        if len(where) != 3 or where[1] != "data_offsets" or where[0] == "__metadata__":
            continue
        if type(value) is not int or value < 0:
            raise ValueError("an offset that is no number")
        first = where[2] == 0
        tensors, held = tensors + first, held + (-value if first else value)
        end = max(end, value)
    return tensors, held, end


# ------------------------------------------------------------------------------------------- Hugging Face indexes


def index_problems(tree: Tree, path: str) -> Iterator[str]:
    """What is wrong between an index and its shards."""
    shards, total = tree.look(path, _index) or ({}, None)
    if not shards:
        return
    folder, held = os.path.dirname(path), 0
    known = True
    for name in sorted(shards):
        if os.path.isabs(name) or ".." in name.split("/"):
            yield "lists %s, which lies outside of its directory" % name
            known = False
            continue
        try:
            size = _shard_bytes(tree, os.path.join(folder, name), shards[name])
        except Broken as error:
            yield "lists %s, which %s" % (name, error)
            size = None
        known, held = known and size is not None, held + (size or 0)
    if known and total is not None and not _fits(held, total, path):
        yield "says total_size %d, its shards hold %d bytes" % (total, held)
    yield from _family_problems(shards, os.listdir(folder))


def _fits(held: int, total: int, path: str) -> bool:
    """A safetensors shard is its tensors and a header; other formats add some bytes to each tensor."""
    return held == total if ".safetensors.index" in os.path.basename(path) else held >= total


def _index(handle: int, size: int) -> Tuple[Dict[str, int], Optional[int]]:
    """({shard: tensors it shall hold}, total_size) of an index. Raises Broken."""
    shards: Dict[str, int] = {}
    total: Optional[int] = None
    if size > MOST_INDEX:
        raise Broken("is too large for an index: %d bytes" % size)
    try:
        for where, value in json_stream.scalars(_reading(handle, 0, size)):
            if where == ("metadata", "total_size") and isinstance(value, (int, float)):
                total = int(value)
            if len(where) == 2 and where[0] == "weight_map" and isinstance(value, str):
                shards[value] = shards.get(value, 0) + 1
                if len(shards) > MOST_SHARDS:
                    raise Broken("lists more than %d shards" % MOST_SHARDS)
    except (ValueError, OverflowError) as error:
        raise Broken("is no index: %s" % error) from error
    if not shards:
        raise Broken("lists no shard")
    return shards, total


def _shard_bytes(tree: Tree, path: str, listed: int) -> Optional[int]:
    """Bytes of tensors in a shard (another format: in the file); None when that is not to be known. Raises Broken."""
    if not path.endswith(".safetensors"):
        found = tree.look(path, lambda _handle, size: size)
        return int(found) if found is not None else None
    inside = tree.look(path, safetensors)
    if inside is None:
        return None
    if inside[0] != listed:
        raise Broken("holds %d tensors, not %d" % (inside[0], listed))
    return int(inside[1])


def _family_problems(shards: Dict[str, int], names: List[str]) -> Iterator[str]:
    """Shards of the same numbered family that are not listed, or that the numbering itself misses."""
    families: Dict[Tuple[str, str], Tuple[int, int]] = {}
    for name in shards:
        match = SHARD.fullmatch(name)
        if match and len(match[3]) < 9:
            key = (match[1], match[4])
            families[key] = (families.get(key, (0, 0))[0] + 1, int(match[3]))
    for name in sorted(names):
        match = SHARD.fullmatch(name)
        if match and (match[1], match[4]) in families and name not in shards:
            yield "does not list %s, which lies beside it" % printed(name)
    for (stem, _), (listed, of) in sorted(families.items()):
        if listed != of:
            yield "lists %d shards of %s, their names say %d" % (listed, stem, of)


# ------------------------------------------------------------------------------------------- torch


def distributed_problems(tree: Tree, path: str) -> Iterator[str]:
    """What is wrong between a .metadata file and the .distcp files beside it."""
    ends = tree.look(path, _stored)
    if ends is None:
        return
    folder = os.path.dirname(path)
    for name in sorted(ends):
        if os.path.isabs(name) or ".." in name.split("/"):
            yield "lists %s, which lies outside of its directory" % name
            continue
        try:
            size = tree.look(os.path.join(folder, name), lambda _handle, size: size)
            if size is not None and size != ends[name]:
                raise Broken("has %d bytes, not %d" % (size, ends[name]))
        except Broken as error:
            yield "lists %s, which %s" % (name, error)
    for name in sorted(os.listdir(folder)):
        if DISTCP.fullmatch(name) and name not in ends:
            yield "does not list %s, which lies beside it" % printed(name)


def _stored(handle: int, _size: int) -> Optional[Dict[str, int]]:
    """{file: bytes it shall have} of a .metadata file; None when it is no torch checkpoint's. Raises Broken."""
    ends: Dict[str, int] = {}
    if os.pread(handle, 1, 0) != b"\x80":
        return None
    try:
        with os.fdopen(os.dup(handle), "rb") as file:
            file.seek(0)
            for state in pickle_look.states(file, STORED):
                name, offset, length = state["relative_path"], state["offset"], state["length"]
                if not (isinstance(name, str) and isinstance(offset, int) and isinstance(length, int)):
                    raise Broken("names its files in a way that is not known here")
                ends[name] = max(ends.get(name, 0), offset + length)
                if len(ends) > MOST_SHARDS:
                    raise Broken("lists more than %d files" % MOST_SHARDS)
    except ValueError as error:
        raise Broken("cannot be read: %s" % error) from error
    return ends


def archive(handle: int, size: int) -> None:
    """A torch archive is a zip file: its directory stands at its end. Other formats are not judged. Raises Broken."""
    if os.pread(handle, 4, 0) == b"PK\x03\x04" and b"PK\x05\x06" not in os.pread(
        handle, ZIP_END, max(0, size - ZIP_END)
    ):
        raise Broken("is cut: the archive's directory at its end is missing")


# ------------------------------------------------------------------------------------------- one name of a tree


def _whole(tree: Tree, path: str, reader: Callable[[int, int], Any]) -> Iterator[str]:
    """Nothing to say of a file that its reader takes for whole."""
    tree.look(path, reader)
    yield from ()


class Inspector:
    """Told every name of a tree in order, says what is wrong. `counts`: how many of each kind were looked at."""

    def __init__(self, tree: Tree) -> None:
        self.tree, self.counts = tree, dict.fromkeys(("safetensors", "index", "distributed", "archive"), 0)
        self.headless = ""

    def problems(self, path: str) -> Iterator[str]:
        folder, name = os.path.split(path)
        kind, work = self._work(folder, name, path)
        if not work:
            return
        self.counts[kind] += 1
        try:
            for problem in work():
                yield "%s %s" % (printed(path), printed(problem))
        except (Broken, OSError) as error:
            yield "%s %s" % (printed(path), printed(str(error)))

    def _work(self, folder: str, name: str, path: str) -> Tuple[str, Optional[Callable[[], Iterator[str]]]]:
        if INDEX.fullmatch(name):
            return "index", lambda: index_problems(self.tree, path)
        if name == ".metadata":
            return "distributed", lambda: distributed_problems(self.tree, path)
        if name.endswith(".safetensors"):
            return "safetensors", lambda: _whole(self.tree, path, safetensors)
        if (
            DISTCP.fullmatch(name)
            and folder != self.headless
            and not os.path.lexists(os.path.join(folder, ".metadata"))
        ):
            self.headless = folder
            return "distributed", lambda: iter(["has no .metadata beside it: the checkpoint was never finished"])
        if ARCHIVE.fullmatch(name):
            return "archive", lambda: _whole(self.tree, path, archive)
        return "", None


def printed(text: str) -> str:
    """Any name as text that can be shown and sent."""
    clean = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(char if char.isprintable() else "\\x%02x" % ord(char) for char in clean)
