"""What is looked at before a backup set is made: sources that are there, room, a destination nobody leads elsewhere.

Standard library only; nothing here writes.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from typing import Any, Dict, Iterator, List, Optional, Tuple

Job = Dict[str, Any]
MARGIN = 1.05
MIB = 1024.0 * 1024.0
PLAIN = ("vfat", "msdos", "exfat")  # filesystems without holes and hard links
MOST_EXTENTS = 10000


class Refused(Exception):
    """The backup is not made, or not called one, and why."""


def last_set(to: str, name: str, method: str = "rsync") -> Optional[Dict[str, Any]]:
    """The newest proved set of this method below `to` other than `name`; damaged or partial ones do not count."""
    found = []
    for entry in os.listdir(to):
        if entry == name or entry.endswith(".partial"):
            continue
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            with open(os.path.join(to, entry, "set.json"), encoding="utf-8") as file:
                described = json.load(file)
            if described.get("method", "rsync") != method:
                continue
            found.append((float(described["ended"]), dict(described, path=os.path.join(to, entry))))
    return max(found, key=lambda pair: pair[0])[1] if found else None


def filesystem_of(path: str) -> Dict[str, str]:
    """{mount, type, source, uuid} of the filesystem that `path` lies on; no uuid where udev knows none."""
    real, best = os.path.realpath(path), {"mount": "", "type": "", "source": ""}
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            left, _, right = line.partition(" - ")
            point = left.split()[4].replace("\\040", " ")
            inside = real == point or real.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best["mount"]):
                best = {"mount": point, "type": right.split()[0], "source": right.split()[1]}
    return dict(best, uuid=uuid_of(best["source"]))


def uuid_of(device: str, folder: str = "/dev/disk/by-uuid") -> str:
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if os.path.realpath(os.path.join(folder, name)) == os.path.realpath(device):
                return name
    return ""


def unmounted(path: str, table: str = "/etc/fstab") -> str:
    """The mount point at or above `path` that the table names and nothing is mounted on, or ''. Not one of `noauto`."""
    real, mounted = os.path.realpath(path), filesystem_of(path)["mount"]
    lines: List[str] = []
    with contextlib.suppress(OSError), open(table, encoding="utf-8", errors="surrogateescape") as file:
        lines = file.read(65536).splitlines()
    for line in lines:
        fields = line.split()
        if line.lstrip().startswith("#") or len(fields) < 4 or "noauto" in fields[3].split(","):
            continue
        point = fields[1].replace("\\040", " ").rstrip("/")
        if point and (real + "/").startswith(point + "/") and len(point) > len(mounted.rstrip("/")):
            return point
    return ""


def checked_paths(job: Job) -> List[str]:
    """The sources. An empty or relative path would mean wherever this happens to run; a set in / could be anything."""
    named = [*job["paths"], job["to"]]
    bad = [path for path in named if not path.startswith("/") or not path.strip("/")]
    if bad or not job["paths"]:
        raise Refused("not an absolute path below the root directory: %s" % (", ".join(map(repr, bad)) or "no source"))
    return list(job["paths"])


def check_sources(paths: List[str], last: Optional[Dict[str, Any]]) -> None:
    """Each source is there, not suddenly empty, and still on the filesystem that it was on."""
    for path in paths:
        if not os.path.isdir(path):
            raise Refused("source %s is no directory" % path)
        _check_mount(path, ((last or {}).get("filesystems") or {}).get(path))
        had = ((last or {}).get("per_path") or {}).get(path, 0)
        if had and not os.listdir(path):
            raise Refused(
                "source %s is empty, the last backup holds %d files of it; earlier backups untouched" % (path, had)
            )


def _check_mount(path: str, before: Optional[Dict[str, str]]) -> None:
    """An empty mount point, or another disk on it, is not what was backed up: its copy would replace the data's."""
    now, missing = filesystem_of(path), unmounted(path)
    if before and before["mount"] != now["mount"]:
        raise Refused(
            "source %s is not mounted (expected %s on %s), what is there belongs to %s; earlier backups untouched"
            % (path, _named(before), before["mount"], now["mount"])
        )
    if before and before.get("uuid") and before["uuid"] != now["uuid"]:
        raise Refused(
            "source %s is another filesystem (expected %s, found %s); earlier backups untouched"
            % (path, _named(before), _named(now))
        )
    if missing:
        raise Refused("source %s is not mounted: /etc/fstab names %s and nothing is mounted there" % (path, missing))


def _named(filesystem: Dict[str, str]) -> str:
    return "UUID %s" % filesystem["uuid"] if filesystem.get("uuid") else filesystem["source"]


def names_below(path: str, exclude: List[str]) -> Iterator[Tuple[str, os.stat_result]]:
    """Every name below `path` with its lstat; what vanishes meanwhile is left out."""
    stack = [path]
    while stack:
        top = stack.pop()
        with contextlib.suppress(OSError):
            for entry in os.scandir(top):
                if entry.path in exclude:
                    continue
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    yield entry.path, status
                    if entry.is_dir(follow_symlinks=False):
                        stack.append(entry.path)


def estimate(
    paths: List[str], exclude: List[str], last: Optional[Dict[str, Any]], plain: bool = False
) -> Dict[str, Any]:
    """What the set needs: the data of each inode once, holes left out, without what the last set already holds.

    plain: the destination keeps neither holes nor hard links, so that every name counts with its whole size.
    """
    need, inodes, files, total = 0, 0, 0, 0
    per_path: Dict[str, int] = {}
    seen = set()
    for path in paths:
        count = 0
        for name, status in names_below(path, exclude):
            key = (status.st_dev, status.st_ino)
            count += 1
            if status.st_nlink > 1 and key in seen and not plain:
                continue
            if status.st_nlink > 1:
                seen.add(key)
            files, total = files + 1, total + status.st_size
            if plain or not _held(name, status, last):
                need, inodes = need + (status.st_size if plain else data_bytes(name, status)), inodes + 1
        per_path[path] = count
    return {"need": need, "inodes": inodes, "files": files, "bytes": total, "per_path": per_path, "plain": plain}


def data_bytes(name: str, status: os.stat_result) -> int:
    """Bytes that a copy of it has to hold. Fewer blocks than bytes are holes, or a compression that a copy lacks."""
    blocks = status.st_blocks * 512
    if not stat.S_ISREG(status.st_mode) or blocks >= status.st_size:
        return blocks
    try:
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return status.st_size
    try:
        return _written(handle, status.st_size)
    finally:
        os.close(handle)


def _written(handle: int, size: int) -> int:
    at, found = 0, 0
    try:
        for _ in range(MOST_EXTENTS):
            begin = os.lseek(handle, at, os.SEEK_DATA)
            at = os.lseek(handle, begin, os.SEEK_HOLE)
            found += at - begin
    except OSError as error:
        return found if error.errno == errno.ENXIO else size  # ENXIO: nothing but a hole from here on
    return size


def _held(name: str, status: os.stat_result, last: Optional[Dict[str, Any]]) -> bool:
    if last is None:
        return False
    try:
        old = os.lstat(last["path"] + "/tree" + name)
    except OSError:
        return False
    return (old.st_size, old.st_mtime_ns) == (status.st_size, status.st_mtime_ns)


def check_room(to: str, wanted: Dict[str, Any]) -> None:
    room = os.statvfs(to)
    free = room.f_bavail * room.f_frsize
    how = "which keeps neither holes nor hard links" if wanted["plain"] else "holes and hard links kept"
    if wanted["need"] * MARGIN > free:
        words = (to, wanted["need"] / MIB, how, free / MIB)
        raise Refused("%s: needs %.0f MiB with these options (%s), %.0f MiB free" % words)
    if room.f_files and wanted["inodes"] > room.f_favail:
        raise Refused("%s: needs %d inodes, %d free" % (to, wanted["inodes"], room.f_favail))


def check_shrink(wanted: Dict[str, Any], last: Optional[Dict[str, Any]], allowed: float) -> None:
    for what in ("files", "bytes"):
        before, now = int((last or {}).get(what) or 0), wanted[what]
        if before and now < before * (1 - allowed / 100.0):
            raise Refused(
                "the sources hold %d %s, the last set held %d: more than %g%% fewer (allow_shrink); nothing was copied"
                % (now, what, before, allowed)
            )


def check_target(paths: List[str], to: str) -> None:
    if not os.path.isdir(to):
        raise Refused("%s is no directory: make it, or mount the backup filesystem there" % to)
    inside = [path for path in paths if (os.path.realpath(to) + "/").startswith(os.path.realpath(path) + "/")]
    if inside:
        raise Refused("%s lies inside of what it shall hold: %s" % (to, inside[0]))
    check_alone(os.path.realpath(to))


def refuse_links(places: List[str]) -> None:
    linked = [place for place in places if os.path.islink(place)]
    if linked:
        raise Refused("%s is a link: the copies would land elsewhere; remove it" % linked[0])


def check_alone(to: str) -> None:
    """Nobody but root may put a link in the way of the copies: not in `to`, and not by renaming what is above it."""
    place = to
    while True:
        status = os.stat(place)
        if status.st_uid not in (0, os.geteuid()):
            raise Refused("%s belongs to uid %d, who could lead the copies elsewhere" % (place, status.st_uid))
        sticky = place != to and status.st_mode & stat.S_ISVTX
        if status.st_mode & stat.S_IWOTH and not sticky:
            raise Refused("everybody may write to %s and could lead the copies elsewhere: chmod o-w it" % place)
        if place == "/":
            return
        place = os.path.dirname(place)
