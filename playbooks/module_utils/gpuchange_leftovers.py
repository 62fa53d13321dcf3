"""Locks and half-written files in a tree, and who holds them. Standard library only; nothing is opened for writing.

A lock counts as held when a live process of this host has it open, is the process whose number it holds, or (git) works
in that repository; a half-written file when a process has it, or for a directory something in it, open.
"""

from __future__ import annotations

import contextlib
import os
import re
from typing import Any, Dict, Iterator, List, Set

HALF = (".incomplete", ".tmp", ".temp", ".part", ".partial", ".crdownload", ".aria2")
NFS = re.compile(r"\.nfs[0-9a-f]{12,}")
RSYNC = re.compile(r"\..+\.([A-Za-z0-9]{6})")
DIGEST_NAMES = {"sha256", "sha512", "sha384", "sha224"}
# Package managers' records of versions: they only share the suffix.
NO_LOCKS = {
    "poetry.lock", "cargo.lock", "yarn.lock", "uv.lock", "flake.lock", "gemfile.lock", "composer.lock", "pipfile.lock",
    "pdm.lock", "pixi.lock", "mix.lock", "podfile.lock", "bun.lock", "deno.lock", "conda.lock",
}  # fmt: skip
LARGEST_LOCK = 4096
NUMBER = re.compile(rb"\s*(\d{1,7})\s*")
MOST = 2000
Item = Dict[str, Any]


def kind_of(name: str, kind: str, size: int, folder: str = "") -> str:
    """lock, git lock, half-written or '' by a name, and by what it is: file, dir, ..."""
    if kind == "dir":
        return "half-written" if name.endswith((".tmp", ".partial")) or name.startswith("tmp-checkpoint-") else ""
    if kind != "file":
        return ""
    if name.endswith(".lock") and name.lower() not in NO_LOCKS and size <= LARGEST_LOCK:
        return "git lock" if "/.git/" in folder + "/" else "lock"
    if name.endswith(HALF) or NFS.fullmatch(name) or _rsync_partial(name):
        return "half-written"
    return ""


def _rsync_partial(name: str) -> bool:
    """`.name.XXXXXX`: six random letters and digits; six small letters alone are a word (.bashrc.backup)."""
    match = RSYNC.fullmatch(name)
    return bool(match) and not match[1].islower() and match[1] not in DIGEST_NAMES and not match[1].isdigit()


class Leftovers:
    """Told every name of a tree; afterwards says of each lock and half-written file whether somebody holds it."""

    def __init__(self) -> None:
        self.items: List[Item] = []
        self.count = 0

    def see(self, path: str, kind: str, size: int) -> None:
        folder, name = os.path.split(path)
        found = kind_of(name, kind, size, folder)
        if found:
            self.count += 1
            if len(self.items) < MOST:
                self.items.append({"path": path, "kind": found, "held": False, "by": ""})

    def judge(self, proc: str = "/proc") -> List[Item]:
        """The items, each with `held` and `by`: number and name of the process."""
        if self.items:
            self._by_number(proc)
            for pid in _pids(proc):
                self._by_process(proc, pid)
        return self.items

    def _by_number(self, proc: str) -> None:
        """A lock that holds a process number says itself whose it is."""
        for item in self.items:
            match = NUMBER.fullmatch(_head(item["path"])) if item["kind"] == "lock" else None
            if match:
                item["kind"] = "lock of a process"
                pid = int(match[1])
                if pid and os.path.isdir(os.path.join(proc, str(pid))):
                    item.update(held=True, by=_named(proc, pid))

    def _by_process(self, proc: str, pid: int) -> None:
        opened = _opened(proc, pid)
        names = {os.path.basename(path) for path in opened}
        directory = _link(os.path.join(proc, str(pid), "cwd")) if _comm(proc, pid).startswith("git") else ""
        for item in self.items:
            if not item["held"] and _holds(item, opened, names, directory):
                item.update(held=True, by=_named(proc, pid))


def _holds(item: Item, opened: Dict[str, str], names: Set[str], directory: str) -> bool:
    path = item["path"]
    if item["kind"] == "git lock" and directory:
        repository = path.rpartition("/.git/")[0]
        if (directory + "/").startswith(repository + "/"):
            return True
    if any(other.startswith(path + "/") for other in opened):
        return True
    if os.path.basename(path) not in names:
        return False
    try:
        wanted = os.lstat(path)
    except OSError:
        return False
    return any(_same(link, wanted) for name, link in opened.items() if os.path.basename(name) == os.path.basename(path))


def _same(link: str, wanted: os.stat_result) -> bool:
    """By inode: a container may know the file by another path."""
    try:
        status = os.stat(link)
    except OSError:
        return False
    return (status.st_dev, status.st_ino) == (wanted.st_dev, wanted.st_ino)


def _opened(proc: str, pid: int) -> Dict[str, str]:
    """{file: link in /proc} of what the process has open."""
    folder, found = os.path.join(proc, str(pid), "fd"), {}
    with contextlib.suppress(OSError):  # gone, or not ours to look into
        for name in os.listdir(folder):
            target = _link(os.path.join(folder, name))
            if target.startswith("/") and not target.startswith(("/dev/", "/proc/")):
                found[target] = os.path.join(folder, name)
    return found


def _pids(proc: str) -> Iterator[int]:
    own = os.getpid()
    yield from (pid for pid in sorted(int(name) for name in os.listdir(proc) if name.isdigit()) if pid != own)


def _named(proc: str, pid: int) -> str:
    return ("%d %s" % (pid, _comm(proc, pid))).strip()


def _comm(proc: str, pid: int) -> str:
    return _head(os.path.join(proc, str(pid), "comm")).decode("utf-8", "replace").strip()


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _head(path: str) -> bytes:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(handle, 64)
    except OSError:
        return b""
    finally:
        os.close(handle)
