"""Walks a directory tree in the order of a manifest, by handles. Standard library only."""

from __future__ import annotations

import errno
import os
import stat
import sys
from typing import Any, Dict, Iterator, List, Optional, Tuple

try:
    from ansible.module_utils import gpuchange_manifest_stream as stream
except ImportError:  # a program now: its copy lies beside it
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import gpuchange_manifest_stream as stream  # type: ignore[import-not-found,no-redef]

KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "dir",
    stat.S_IFLNK: "link",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFBLK: "block",
    stat.S_IFCHR: "char",
}
Entry = Dict[str, Any]


class Found:
    """One name of a tree: its key in the order of the manifest, and its entry without the hash."""

    def __init__(self, path: bytes, status: os.stat_result) -> None:
        self.key = stream.key_of(path)
        self.entry: Entry = {"path": stream.to_text(path), "kind": KINDS.get(stat.S_IFMT(status.st_mode), "other")}
        self.entry.update(
            mode=stat.S_IMODE(status.st_mode),
            uid=status.st_uid,
            gid=status.st_gid,
            mtime_ns=status.st_mtime_ns,
            ctime_ns=status.st_ctime_ns,
            ino=status.st_ino,
        )
        if self.entry["kind"] == "file":
            self.entry.update(size=status.st_size, nlink=status.st_nlink)
        if self.entry["kind"] in ("block", "char"):
            self.entry["rdev"] = status.st_rdev


class Walker:
    """Walks by directory handles: a name that turns into a link on the way is never followed out of the tree."""

    def __init__(self, exclude: List[bytes]) -> None:
        self.exclude = set(exclude)

    def walk(self, root: bytes, shown: bytes) -> Iterator[Tuple[Found, Optional[int], bytes]]:
        """Yields (found, handle of its directory, its name there). A root that is a link itself is followed, once."""
        root = os.path.realpath(root)
        os.stat(root)  # a root that is not there is an error, unlike a file that vanishes meanwhile
        parent = os.open(os.path.dirname(root) or b"/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield from self._name(parent, os.path.basename(root) or b".", root, shown)
        finally:
            os.close(parent)

    def _name(
        self, parent: int, name: bytes, real: bytes, shown: bytes
    ) -> Iterator[Tuple[Found, Optional[int], bytes]]:
        if real in self.exclude or shown in self.exclude:
            return
        try:
            status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            return
        found = Found(shown, status)
        yield found, parent, name
        if found.entry["kind"] == "dir" and "error" not in found.entry:
            yield from self._below(parent, name, real, shown, found)

    def _below(
        self, parent: int, name: bytes, real: bytes, shown: bytes, found: Found
    ) -> Iterator[Tuple[Found, Optional[int], bytes]]:
        try:
            here = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        except OSError as error:
            if error.errno != errno.ENOENT:
                found.entry["error"] = errno.errorcode.get(error.errno or 0, str(error.errno))
            return
        try:
            for child in sorted(os.fsencode(each) for each in os.listdir(here)):
                yield from self._name(here, child, os.path.join(real, child), os.path.join(shown, child))
        finally:
            os.close(here)


def open_to_read(name: bytes, parent: int) -> int:
    """A handle that cannot block (FIFO) and does not touch the access time where that is allowed."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(name, flags | getattr(os, "O_NOATIME", 0), dir_fd=parent)
    except PermissionError:
        return os.open(name, flags, dir_fd=parent)
