"""Hash manifest of directory trees, made on the host: parallel, in bounded memory, resumable. Standard library only.

Usage: gpuchange_hashing.py JOB.json, with
  roots     [[path on this host, name shown in the manifest], ...]
  out       prefix: writes <out>.jsonl (one entry a line), <out>.sha256 (for sha256sum -c), <out>.progress
  previous  manifests (.jsonl) whose hashes hold for files of the same size, mtime, ctime and inode
  compare   manifest to compare with, or null;  compare_sha256: its expected digest, or ""
  unmoved   what must be equal for that, if not these
  listed    names in the manifest's order with the algorithms by which others list them (gpuchange_sums), or absent
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
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import IO, Any, Callable, Dict, List, Optional, Sequence, Tuple

try:
    from ansible.module_utils import gpuchange_manifest_stream as stream
    from ansible.module_utils import gpuchange_walk as walking
except ImportError:  # a program now: its copy lies beside it
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import gpuchange_manifest_stream as stream  # type: ignore[import-not-found,no-redef]
    import gpuchange_walk as walking  # type: ignore[import-not-found,no-redef]

CHUNK = 1024 * 1024
BUFFERS = 16 * CHUNK  # for all threads together
MOST_THREADS = 16  # a GPU server may have hundreds of cores: by then the disk is the limit, and memory is not ours
WINDOW = 128  # files in flight, each with an open handle
TELL_S = 1.0
TRIES = 3  # a file that changes while it is read is read again
YOUNG_NS = 1_000_000_000  # so near to its hashing a change need not show in the times: such a hash is not reused

Entry = Dict[str, Any]
UNMOVED = stream.UNMOVED


# ------------------------------------------------------------------------------------------- hashing


def hash_handle(handle: int, entry: Entry, how: "How") -> Entry:
    """The entry with its hash; `busy` when the file would not hold still, `error` (EIO, ...) when it cannot be read."""
    if how.drop_cache:
        _drop(handle)
    try:
        for _ in range(TRIES):
            before, began = os.fstat(handle), time.time_ns()
            digests, size = _digest(handle, how)
            after = os.fstat(handle)
            if _same(before, after) and size == after.st_size:
                young = {"young": True} if began - after.st_ctime_ns < YOUNG_NS else {}
                times = {"mtime_ns": after.st_mtime_ns, "ctime_ns": after.st_ctime_ns}
                return dict(entry, read=size, size=size, **digests, **times, **young)
        return dict(entry, busy=True)
    except OSError as error:
        return dict(entry, error=errno.errorcode.get(error.errno or 0, str(error.errno)))
    finally:
        if how.drop_cache:
            _drop(handle)
        os.close(handle)


class How:
    """How files are read: in which pieces, past the cache or not, by which algorithms; who is told of it."""

    def __init__(
        self,
        chunk: int = CHUNK,
        drop_cache: bool = False,
        also: Sequence[str] = (),
        told: Callable[[int], None] = lambda _count: None,
    ) -> None:
        self.chunk, self.drop_cache, self.also, self.told = chunk, drop_cache, also, told


class Meter:
    """Bytes read so far, by all threads."""

    def __init__(self) -> None:
        self.lock, self.bytes = threading.Lock(), 0

    def add(self, count: int) -> None:
        with self.lock:
            self.bytes += count


def _drop(handle: int) -> None:
    """Let the kernel forget its clean pages of this file, so that reading it comes from the disk."""
    with contextlib.suppress(OSError):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


def _digest(handle: int, how: How) -> Tuple[Dict[str, str], int]:
    with contextlib.suppress(OSError):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    totals = {name: hasher(name) for name in dict.fromkeys(["sha256", *how.also])}
    offset, buffer = 0, bytearray(how.chunk)
    view = memoryview(buffer)
    while True:
        count = os.preadv(handle, [buffer], offset)
        if not count:
            return {name: total.hexdigest() for name, total in totals.items()}, offset
        for total in totals.values():
            total.update(view[:count])
        how.told(count)
        offset += count


def hasher(name: str) -> Any:
    """A hash object; md5 and sha1 too where the host's policy keeps them from being used for security."""
    try:
        return hashlib.new(name, usedforsecurity=False)
    except TypeError:  # Python 3.8
        return hashlib.new(name)


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


def known_hash(
    readers: List[stream.Reader], found: walking.Found, unmoved: Sequence[str] = UNMOVED, also: Sequence[str] = ()
) -> Optional[Entry]:
    """What an earlier manifest knows of this very file, if it has not moved since."""
    answers = [reader.at(found.key) for reader in readers]
    for old in answers:
        if (
            old
            and not old.get("young")
            and all(old.get(name) for name in ("sha256", *also))
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
        self.meter = Meter()
        self.threads = int(job.get("threads") or min(os.cpu_count() or 2, MOST_THREADS))
        self.listed = stream.Reader(job.get("listed") or os.devnull)

    def make(self, readers: List[stream.Reader]) -> None:
        walker = walking.Walker([stream.to_bytes(path) for path in self.job.get("exclude", [])])
        waiting: "deque[Future[Entry]]" = deque()
        with ThreadPoolExecutor(max_workers=self.threads) as pool:
            for root, shown in sorted(self.job["roots"], key=lambda pair: stream.key_of(stream.to_bytes(pair[1]))):
                for found, parent, name in walker.walk(stream.to_bytes(root), stream.to_bytes(shown)):
                    real = stream.to_bytes(root) + stream.to_bytes(found.entry["path"])[len(stream.to_bytes(shown)) :]
                    waiting.append(self._begin(pool, readers, found, parent, name, real))
                    while len(waiting) >= WINDOW or (waiting and waiting[0].done()):
                        self.take(self._ended(waiting.popleft()))
            for future in waiting:
                self.take(self._ended(future))

    def _ended(self, future: "Future[Entry]") -> Entry:
        """Its entry. A file may take an hour: whoever looks is told meanwhile how far it is."""
        while not wait([future], timeout=TELL_S).done:
            self.tell()
        return future.result()

    def _begin(
        self,
        pool: ThreadPoolExecutor,
        readers: List[stream.Reader],
        found: walking.Found,
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
        also = sorted({str(row["algorithm"]) for row in self.listed.all_at(found.key)})
        old = known_hash(readers, found, self.job.get("unmoved") or UNMOVED, also)
        if old:
            return _settled(dict(entry, **{key: old[key] for key in ("sha256", *also, "xattr") if key in old}))
        try:
            handle = walking.open_to_read(name, parent or 0)
        except OSError as error:
            return _settled(dict(entry, error=errno.errorcode.get(error.errno or 0, str(error.errno))))
        how = How(min(CHUNK, BUFFERS // self.threads), bool(self.job.get("drop_cache")), also, self.meter.add)
        return pool.submit(hash_handle, handle, _with_xattr(entry, real), how)

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
        if read:  # what was read is kept, whatever ends this program before the next file is through
            self.out.flush()
        if time.monotonic() - self.told > TELL_S:
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
        known = self.totals["bytes"] - self.totals["read_bytes"]  # of files that had not to be read again
        seen = dict(self.totals, bytes=known + self.meter.bytes, rate=int(self.meter.bytes / seconds))
        replace_text(self.job["out"] + ".progress", json.dumps(seen))

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
        return _digest(handle, How())[0]["sha256"]
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
        stream.lay_over(out + ".jsonl.new", torn)
    readers = [stream.Reader(path) for path in [torn, *list(job.get("previous", []))]]
    with open(out + ".jsonl.new", "wb") as lines, open(out + ".sha256.new", "wb") as sums:
        maker = Maker(job, lines, sums)
        maker.make(readers)
        for file in (lines, sums):
            file.flush()
            os.fsync(file.fileno())
    for reader in [*readers, maker.listed]:
        reader.close()
    for suffix in (".jsonl", ".sha256"):
        os.replace(out + suffix + ".new", out + suffix)
    for leftover in (torn, out + ".progress"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(leftover)
    summary = maker.summary()
    return dict(summary, compare=stream.compare(expected, out + ".jsonl")) if expected else summary


def program(path: str, work: Callable[[Dict[str, Any]], Dict[str, Any]]) -> int:
    """Do the job in the file `path`, write its summary; a failure is printed. Returns the exit code."""
    os.umask(0o077)
    sys.setrecursionlimit(10000)  # one generator level a directory level
    with open(path, encoding="utf-8") as file:
        job = json.load(file)
    try:
        summary = work(job)
    except (OSError, ValueError) as error:
        print(json.dumps({"failed": str(error)}))
        return 1
    replace_text(job["out"] + ".summary.json", json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(program(sys.argv[1], run_job))
