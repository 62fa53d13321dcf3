"""Reads a tar archive back, file by file, into a hash manifest, and restores a sample of it. Standard library only.

Nothing here knows what the archive should hold: what is found is compared with the source's own manifest by the caller.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import json
import os
import shutil
import subprocess
import sys
import tarfile
import threading
from decimal import Decimal
from typing import IO, Any, Dict, Iterator, List, Optional, Tuple

try:
    from ansible.module_utils import gpuchange_backup_look as looking
    from ansible.module_utils import gpuchange_hashing as hashing
    from ansible.module_utils import gpuchange_manifest_stream as stream
except ImportError:  # a program now: its copies lie beside it
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import gpuchange_backup_look as looking  # type: ignore[import-not-found,no-redef]
    import gpuchange_hashing as hashing  # type: ignore[import-not-found,no-redef]
    import gpuchange_manifest_stream as stream  # type: ignore[import-not-found,no-redef]

CHUNK = 1024 * 1024
PACKERS = {
    "none": ("", [], ""),
    "gzip": ("gzip", ["gzip", "--no-name", "--stdout"], ".gz"),
    "zstd": ("zstd", ["zstd", "--quiet", "--stdout"], ".zst"),
}
SAMPLE = 16  # files that are restored; those with attributes first, then by hash, so that no place is preferred
SAMPLE_BYTES = 64 * CHUNK
Entry = Dict[str, Any]


class Hashed:
    """A file that is hashed as it is read."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.total = file, hashlib.sha256()

    def read(self, size: int = CHUNK) -> bytes:
        data = self.file.read(size)
        self.total.update(data)
        return data


@contextlib.contextmanager
def unpacked(source: Hashed, compression: str) -> Iterator[Any]:
    """The archive without its compression. All of `source` has been read when this ends."""
    if compression == "none":
        yield source
        _drain(source)
        return
    argv = [PACKERS[compression][0], "-dc"]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    feeder = threading.Thread(target=_feed, args=(source, process.stdin), daemon=True)
    feeder.start()
    try:
        yield process.stdout
        _drain(process.stdout)
    except BaseException:
        process.kill()
        raise
    finally:
        feeder.join()
        said = process.stderr.read().decode("utf-8", "replace") if process.stderr else ""
        code = process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe:
                pipe.close()
    if code:
        raise looking.Refused("the archive cannot be read back: %s ended with %d: %s" % (argv[0], code, said[:300]))


def _feed(source: Hashed, pipe: Optional[IO[bytes]]) -> None:
    """Broken data ends the program early; the rest is read all the same, for the hash of the whole."""
    if pipe is None:
        return
    try:
        for data in iter(source.read, b""):
            pipe.write(data)
    except OSError:
        _drain(source)
    finally:
        with contextlib.suppress(OSError):
            pipe.close()


def _drain(file: Any) -> None:
    while file.read(CHUNK):
        pass


class Reading:
    """One pass over an archive. Links count as the file that they are: its hash is known from its first name."""

    def __init__(self, source_manifest: str) -> None:
        self.source = stream.Reader(source_manifest)
        self.linked: Dict[str, Tuple[str, int]] = {}
        self.sample: List[Tuple[Tuple[int, str], Entry]] = []
        self.smallest: Optional[Entry] = None

    def entries(self, archive: tarfile.TarFile) -> Iterator[Entry]:
        while True:
            info = archive.next()
            if info is None:
                return
            archive.members = []  # else it keeps every name in memory
            yield self._entry(archive, info)

    def _entry(self, archive: tarfile.TarFile, info: tarfile.TarInfo) -> Entry:
        entry: Entry = {"path": "/" + info.name.strip("/"), "kind": _kind(info), "mode": info.mode & 0o7777}
        mtime = info.pax_headers.get("mtime") or info.mtime
        entry.update(uid=info.uid, gid=info.gid, mtime_ns=int(Decimal(mtime) * 1000000000))
        if entry["kind"] == "link":
            entry["target"] = info.linkname
        elif entry["kind"] in ("block", "char"):
            entry["rdev"] = os.makedev(info.devmajor, info.devminor)
        elif info.islnk():
            first = self.linked.get("/" + info.linkname.strip("/"))
            entry.update({"sha256": first[0], "size": first[1]} if first else {"error": "a link to nothing"})
        elif entry["kind"] == "file":
            self._content(archive, info, entry)
        return entry

    def _content(self, archive: tarfile.TarFile, info: tarfile.TarInfo, entry: Entry) -> None:
        content, total, size = archive.extractfile(info), hashlib.sha256(), 0
        while content:
            data = content.read(CHUNK)
            if not data:
                break
            total.update(data)
            size += len(data)
        entry.update(sha256=total.hexdigest(), size=size)
        known = self.source.at(stream.key_of(stream.to_bytes(entry["path"]))) or {}
        if known.get("nlink", 1) > 1:
            self.linked[entry["path"]] = (entry["sha256"], size)
        if known.get("sha256") == entry["sha256"]:
            self._consider(known)

    def _consider(self, known: Entry) -> None:
        if self.smallest is None or known["size"] < self.smallest["size"]:
            self.smallest = dict(known)
        if known["size"] > SAMPLE_BYTES // SAMPLE:
            return
        rank = (int(bool(known.get("xattr"))), known["sha256"] + known["path"])
        heapq.heappush(self.sample, (rank, dict(known)))
        if len(self.sample) > SAMPLE:
            heapq.heappop(self.sample)

    def chosen(self, room: int) -> List[Entry]:
        """What is to be restored: a sample of the small files; of large files the smallest, if there is room for it."""
        if self.sample or self.smallest is None:
            return [entry for _, entry in self.sample]
        return [self.smallest] if self.smallest["size"] * 2 < room else []


def _kind(info: tarfile.TarInfo) -> str:
    if info.isreg() or info.islnk():
        return "file"
    kinds = {tarfile.DIRTYPE: "dir", tarfile.SYMTYPE: "link", tarfile.FIFOTYPE: "fifo", tarfile.CHRTYPE: "char"}
    return "block" if info.type == tarfile.BLKTYPE else kinds.get(info.type, "other")


def read_back(path: str, compression: str, source_manifest: str, out: str) -> Dict[str, Any]:
    """Write <out>.jsonl and <out>.sha256 of what the archive holds, read from the disk.

    Returns the manifest's summary, `archive_sha256` as read and `sample`: source entries that may be restored.
    Raises Refused when it cannot be read.
    """
    reading = Reading(source_manifest)
    with open(path, "rb") as file, open(out + ".jsonl", "wb") as lines, open(out + ".sha256", "wb") as sums:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        maker, source = hashing.Maker({"out": out}, lines, sums), Hashed(file)
        with unpacked(source, compression) as plain:
            _take(reading, plain, maker)
        for made in (lines, sums):
            made.flush()
            os.fsync(made.fileno())
    reading.source.close()
    with contextlib.suppress(FileNotFoundError):
        os.unlink(out + ".progress")
    room = os.statvfs(os.path.dirname(path))
    sample = reading.chosen(room.f_bavail * room.f_frsize)
    return dict(maker.summary(), archive_sha256=source.total.hexdigest(), sample=sample)


def _take(reading: Reading, plain: Any, maker: hashing.Maker) -> None:
    try:
        with tarfile.open(fileobj=plain, mode="r|", encoding="utf-8", errors="surrogateescape") as archive:
            for entry in reading.entries(archive):
                maker.take(dict(entry, read=entry.get("size", 0)))
    except (tarfile.TarError, EOFError, ValueError, ArithmeticError) as error:
        raise looking.Refused("the archive cannot be read back: %s" % error) from error


def restored(path: str, compression: str, sample: List[Entry], scratch: str) -> int:
    """Restore the sample below `scratch` with tar, compare it with the source's entries. Returns how many were equal.

    Raises Refused for the first that is not. `scratch` is taken away in any case.
    """
    shutil.rmtree(scratch, ignore_errors=True)
    os.makedirs(scratch + "/tree", mode=0o700)
    try:
        if sample:
            _extract(path, compression, sample, scratch)
        attributes = _has_attributes(scratch)
        for entry in sample:
            why = _unequal(scratch + "/tree" + entry["path"], entry, attributes)
            if why:
                raise looking.Refused("restored for a test, %s: %s" % (why, entry["path"]))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return len(sample)


def _extract(path: str, compression: str, sample: List[Entry], scratch: str) -> None:
    names = scratch + "/names"
    with open(names, "wb") as file:
        file.write(b"".join(stream.to_bytes(entry["path"])[1:] + b"\0" for entry in sample))
    argv = ["tar", "--extract", "--file=" + path, "--numeric-owner", "--acls", "--xattrs", "--xattrs-include=*"]
    argv += ["--same-permissions", "--directory=" + scratch + "/tree", "--occurrence=1", "--no-wildcards"]
    argv += ["--use-compress-program=" + PACKERS[compression][0]] if compression != "none" else []
    argv += ["--selinux"] if os.path.isdir("/sys/fs/selinux") else []
    argv += ["--null", "--verbatim-files-from", "--files-from=" + names]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False)
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace")[:300]
        raise looking.Refused("a sample cannot be restored: tar ended with %d: %s" % (done.returncode, said))


def _has_attributes(folder: str) -> bool:
    try:
        os.setxattr(folder, "user.gpuchange", b"1")
    except OSError:
        return False
    return True


def _unequal(place: str, entry: Entry, attributes: bool) -> str:
    """How the restored file differs from its source, or ''. Owner and times were compared in the archive itself."""
    found = hashing.file_sha256(place)
    if found != entry["sha256"]:
        return "hash differs: source %.16s, restored %.16s" % (entry["sha256"], found)
    if attributes and hashing.xattr_digest(stream.to_bytes(place)) != entry.get("xattr", ""):
        return "extended attributes or ACLs differ"
    return ""


def without(manifest: str, out: str, kinds: Tuple[str, ...], paths: Tuple[str, ...] = ()) -> int:
    """Copy a manifest without entries of these kinds and without what lies at or below `paths`. Returns how many."""
    left_out = 0
    with open(manifest, "rb") as lines, open(out, "wb") as file:
        for line in lines:
            entry = json.loads(line)
            if entry["kind"] in kinds or any((entry["path"] + "/").startswith(path + "/") for path in paths):
                left_out += 1
            else:
                file.write(line)
    return left_out
