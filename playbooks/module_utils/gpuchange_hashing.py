"""Hash manifest of directory trees, made on the host: parallel, in bounded memory, resumable. Standard library only.

Usage: gpuchange_hashing.py JOB.json, with
  roots     [[path on this host, name shown in the manifest], ...]
  out       prefix: writes <out>.jsonl (one entry a line), <out>.sha256 (for sha256sum -c), <out>.progress
  previous  manifests (.jsonl) whose hashes hold for files of the same size, mtime, ctime and inode
  compare   manifest to compare with, or null;  compare_sha256: its expected digest, or ""
  unmoved   what must be equal for that, if not these
  exclude   absolute paths that are left out, threads, drop_cache
The summary is written to <out>.summary.json; a failure is printed as a line of JSON. Entries come in depth-first order
of their names as bytes, so that two manifests can be compared as streams, whatever their size.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import json
import os
import stat
import sys
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any, Dict, Iterator, List, Optional, Sequence, Tuple

try:
    from ansible.module_utils import gpuchange_manifest_stream as stream
except ImportError:  # a program now: its copy lies beside it
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import gpuchange_manifest_stream as stream  # type: ignore[import-not-found,no-redef]

CHUNK = 1024 * 1024
WINDOW = 128  # files in flight, each with an open handle
TRIES = 3  # a file that changes while it is read is read again
YOUNG_NS = 1_000_000_000  # so near to its hashing a change need not show in the times: such a hash is not reused

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
UNMOVED = ("kind", "size", "mtime_ns", "ctime_ns", "ino")


# ------------------------------------------------------------------------------------------- walking


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


# ------------------------------------------------------------------------------------------- hashing


def open_to_read(name: bytes, parent: int) -> int:
    """A handle that cannot block (FIFO) and does not touch the access time where that is allowed."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(name, flags | getattr(os, "O_NOATIME", 0), dir_fd=parent)
    except PermissionError:
        return os.open(name, flags, dir_fd=parent)


def hash_handle(handle: int, entry: Entry, drop_cache: bool) -> Entry:
    """The entry with its hash; `busy` when the file would not hold still, `error` (EIO, ...) when it cannot be read."""
    if drop_cache:
        _drop(handle)
    try:
        for _ in range(TRIES):
            before, began = os.fstat(handle), time.time_ns()
            digest, size = _digest(handle)
            after = os.fstat(handle)
            if _same(before, after) and size == after.st_size:
                young = {"young": True} if began - after.st_ctime_ns < YOUNG_NS else {}
                times = {"mtime_ns": after.st_mtime_ns, "ctime_ns": after.st_ctime_ns}
                return dict(entry, sha256=digest, read=size, size=size, **times, **young)
        return dict(entry, busy=True)
    except OSError as error:
        return dict(entry, error=errno.errorcode.get(error.errno or 0, str(error.errno)))
    finally:
        if drop_cache:
            _drop(handle)
        os.close(handle)


def _drop(handle: int) -> None:
    """Let the kernel forget its clean pages of this file, so that reading it comes from the disk."""
    with contextlib.suppress(OSError):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


def _digest(handle: int) -> Tuple[str, int]:
    with contextlib.suppress(OSError):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    total, offset, buffer = hashlib.sha256(), 0, bytearray(CHUNK)
    view = memoryview(buffer)
    while True:
        count = os.preadv(handle, [buffer], offset)
        if not count:
            return total.hexdigest(), offset
        total.update(view[:count])
        offset += count


def _same(one: os.stat_result, two: os.stat_result) -> bool:
    return (one.st_size, one.st_mtime_ns, one.st_ctime_ns) == (two.st_size, two.st_mtime_ns, two.st_ctime_ns)


def xattr_digest(path: bytes) -> str:
    """Digest over all extended attributes, ACLs included; '' when there is none."""
    try:
        names = sorted(os.listxattr(path, follow_symlinks=False))
        pairs = [(name, base64.b64encode(os.getxattr(path, name, follow_symlinks=False)).decode()) for name in names]
    except OSError:
        return ""
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest() if pairs else ""


# ------------------------------------------------------------------------------------------- making


def known_hash(readers: List[stream.Reader], found: Found, unmoved: Sequence[str] = UNMOVED) -> Optional[Entry]:
    """What an earlier manifest knows of this very file, if it has not moved since."""
    answers = [reader.at(found.key) for reader in readers]
    for old in answers:
        if (
            old
            and old.get("sha256")
            and not old.get("young")
            and all(old.get(name) == found.entry.get(name) for name in unmoved)
        ):
            return old
    return None


class Maker:
    """Makes one manifest: the main thread walks and writes in order, the pool reads and hashes."""

    def __init__(self, job: Dict[str, Any], out: IO[bytes], sums: IO[bytes]) -> None:
        self.job, self.out, self.sums = job, out, sums
        self.totals: Dict[str, int] = dict.fromkeys(
            ("files", "dirs", "links", "others", "bytes", "read_files", "read_bytes", "busy", "unreadable"), 0
        )
        self.names: Dict[str, List[str]] = {"busy": [], "unreadable": []}
        self.content, self.metadata, self.whole = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()
        self.began = self.told = time.monotonic()

    def make(self, readers: List[stream.Reader]) -> None:
        walker = Walker([stream.to_bytes(path) for path in self.job.get("exclude", [])])
        waiting: "deque[Future[Entry]]" = deque()
        with ThreadPoolExecutor(max_workers=int(self.job.get("threads") or os.cpu_count() or 2)) as pool:
            for root, shown in sorted(self.job["roots"], key=lambda pair: stream.key_of(stream.to_bytes(pair[1]))):
                for found, parent, name in walker.walk(stream.to_bytes(root), stream.to_bytes(shown)):
                    real = stream.to_bytes(root) + stream.to_bytes(found.entry["path"])[len(stream.to_bytes(shown)) :]
                    waiting.append(self._begin(pool, readers, found, parent, name, real))
                    while len(waiting) >= WINDOW or (waiting and waiting[0].done()):
                        self.take(waiting.popleft().result())
            for future in waiting:
                self.take(future.result())

    def _begin(
        self,
        pool: ThreadPoolExecutor,
        readers: List[stream.Reader],
        found: Found,
        parent: Optional[int],
        name: bytes,
        real: bytes,
    ) -> "Future[Entry]":
        entry = found.entry
        if entry["kind"] == "link":
            with contextlib.suppress(OSError):
                entry["target"] = stream.to_text(os.readlink(name, dir_fd=parent))
        if entry["kind"] != "file":
            return _settled(_with_xattr(entry, real))
        old = known_hash(readers, found, self.job.get("unmoved") or UNMOVED)
        if old:
            return _settled(dict(entry, sha256=old["sha256"], **({"xattr": old["xattr"]} if "xattr" in old else {})))
        try:
            handle = open_to_read(name, parent or 0)
        except OSError as error:
            return _settled(dict(entry, error=errno.errorcode.get(error.errno or 0, str(error.errno))))
        return pool.submit(hash_handle, handle, _with_xattr(entry, real), bool(self.job.get("drop_cache")))

    def take(self, entry: Entry) -> None:
        read = entry.pop("read", None)
        self._count(entry, read)
        line = json.dumps(entry, sort_keys=True).encode() + b"\n"
        self.out.write(line)
        self.whole.update(line)
        identity = [entry["path"]] + [entry.get(name) for name in stream.CONTENT]
        self.content.update(json.dumps(identity).encode() + b"\n")
        self.metadata.update(
            json.dumps([entry["path"]] + [entry.get(name) for name in stream.METADATA]).encode() + b"\n"
        )
        if entry.get("sha256"):
            self.sums.write(sum_line(entry["sha256"], stream.to_bytes(entry["path"])))
        if time.monotonic() - self.told > 1.0:
            self.tell()

    def _count(self, entry: Entry, read: Optional[int]) -> None:
        plural = {"file": "files", "dir": "dirs", "link": "links"}.get(entry["kind"], "others")
        self.totals[plural] += 1
        self.totals["bytes"] += entry.get("size", 0)
        if read is not None:
            self.totals["read_files"] += 1
            self.totals["read_bytes"] += read
        for kind, present in (("busy", entry.get("busy")), ("unreadable", entry.get("error"))):
            if present:
                self.totals[kind] += 1
                if len(self.names[kind]) < stream.SHOWN:
                    self.names[kind].append("%s%s" % (entry["path"], " (%s)" % present if present is not True else ""))

    def tell(self) -> None:
        """Progress for whoever looks: files and bytes so far, and the rate in bytes a second."""
        self.told = time.monotonic()
        seconds = max(self.told - self.began, 1e-6)
        replace_text(
            self.job["out"] + ".progress", json.dumps(dict(self.totals, rate=int(self.totals["read_bytes"] / seconds)))
        )

    def summary(self) -> Dict[str, Any]:
        return dict(
            self.totals,
            content=self.content.hexdigest(),
            metadata=self.metadata.hexdigest(),
            jsonl_sha256=self.whole.hexdigest(),
            names=self.names,
            seconds=round(time.monotonic() - self.began, 3),
        )


def _settled(entry: Entry) -> "Future[Entry]":
    future: "Future[Entry]" = Future()
    future.set_result(entry)
    return future


def _with_xattr(entry: Entry, real: bytes) -> Entry:
    digest = xattr_digest(real)
    return dict(entry, xattr=digest) if digest else entry


def sum_line(digest: str, path: bytes) -> bytes:
    """One line that `sha256sum -c` reads, names with newline or backslash included."""
    escaped = path.replace(b"\\", b"\\\\").replace(b"\n", b"\\n").replace(b"\r", b"\\r")
    return (b"\\" if escaped != path else b"") + digest.encode() + b"  " + escaped + b"\n"


# ------------------------------------------------------------------------------------------- the job


def replace_text(path: str, text: str) -> None:
    with open(path + ".new", "w", encoding="ascii") as file:
        file.write(text)
    os.replace(path + ".new", path)


def file_sha256(path: str) -> str:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _digest(handle)[0]
    finally:
        os.close(handle)


def run_job(job: Dict[str, Any]) -> Dict[str, Any]:
    """Make the manifest, and compare it. Raises ValueError when what it shall be compared with was tampered with."""
    out = job["out"]
    expected = job.get("compare")
    if expected and job.get("compare_sha256") and file_sha256(expected) != job["compare_sha256"]:
        raise ValueError("%s is not the manifest that was recorded: its sha256 differs" % expected)
    torn = out + ".jsonl.torn"
    if os.path.exists(out + ".jsonl.new"):  # an earlier try was interrupted: what it read need not be read again
        os.replace(out + ".jsonl.new", torn)
    readers = [stream.Reader(path) for path in [torn, *list(job.get("previous", []))]]
    with open(out + ".jsonl.new", "wb") as lines, open(out + ".sha256.new", "wb") as sums:
        maker = Maker(job, lines, sums)
        maker.make(readers)
        for file in (lines, sums):
            file.flush()
            os.fsync(file.fileno())
    for reader in readers:
        reader.close()
    for suffix in (".jsonl", ".sha256"):
        os.replace(out + suffix + ".new", out + suffix)
    for leftover in (torn, out + ".progress"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(leftover)
    summary = maker.summary()
    return dict(summary, compare=stream.compare(expected, out + ".jsonl")) if expected else summary


def main(path: str) -> int:
    os.umask(0o077)
    sys.setrecursionlimit(10000)  # one generator level a directory level
    with open(path, encoding="utf-8") as file:
        job = json.load(file)
    try:
        summary = run_job(job)
    except (OSError, ValueError) as error:
        print(json.dumps({"failed": str(error)}))
        return 1
    replace_text(job["out"] + ".summary.json", json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
