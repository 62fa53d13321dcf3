"""Makes one backup set with rsync and proves it by reading it back. A program of a host unit; standard library only.

Usage: gpuchange_backup.py JOB.json, with
  paths, exclude    absolute paths on this host
  to, name          the set is <to>/<name>/: tree/<absolute path>, set.json, manifest.jsonl, manifest.sha256
  allow_shrink      percent by which files or bytes may be fewer than in the last set
  final             the drained host's set: parts of the last set that it links to were read back then, not again
  work, previous    prefix for the source's manifest; manifests of the source that spare reading unmoved files
The set is built as <name>.partial and gets its name only when every byte of it was read back and equals its source.
Earlier sets are never written to: files that did not change are hard links into the last one.
The last line of the output is JSON: the set's summary, or {"failed": why}.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
import time
from typing import Any, Dict, Iterator, List, Optional, Tuple

try:
    from ansible.module_utils import gpuchange_hashing as hashing
    from ansible.module_utils import gpuchange_manifest_stream as stream
except ImportError:  # a program now: its copies lie beside it
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import gpuchange_hashing as hashing  # type: ignore[import-not-found,no-redef]
    import gpuchange_manifest_stream as stream  # type: ignore[import-not-found,no-redef]

Job = Dict[str, Any]
RSYNC = ["rsync", "-aHAXS", "--numeric-ids", "--relative", "--delete", "--no-inc-recursive"]
RSYNC.append("--modify-window=-1")  # without it a change within the same second and of the same size is not copied
LINKED = ["kind", "size", "mtime_ns", "ino"]  # a new link moves a file's ctime, nothing else
PASSES = 3  # files written while they were copied are copied again
MARGIN = 1.05
MIB = 1024.0 * 1024.0
EXIT_CODES = {
    1: "syntax or usage error",
    2: "protocol mismatch",
    3: "cannot select input or output files",
    4: "action not supported",
    5: "error starting the protocol",
    10: "error in socket I/O: the connection failed",
    11: "error in file I/O: the target may be full",
    12: "error in the protocol stream: the other side died or is full",
    13: "errors with diagnostics",
    14: "error in IPC",
    20: "ended by a signal",
    22: "out of memory",
    23: "some files could not be copied",
    25: "too many deletions",
    30: "timed out",
    35: "timed out connecting",
}
VANISHED = 24  # files that were deleted while we copied: normal on a host in service


class Refused(Exception):
    """The backup is not made, or not called one, and why."""


# ------------------------------------------------------------------------------------------- looking first


def last_set(to: str, name: str) -> Optional[Dict[str, Any]]:
    """The newest proved set below `to` other than `name`; damaged or partial ones do not count."""
    found = []
    for entry in os.listdir(to):
        if entry == name or entry.endswith(".partial"):
            continue
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            with open(os.path.join(to, entry, "set.json"), encoding="utf-8") as file:
                described = json.load(file)
            found.append((float(described["ended"]), dict(described, path=os.path.join(to, entry))))
    return max(found, key=lambda pair: pair[0])[1] if found else None


def filesystem_of(path: str) -> Dict[str, str]:
    """{mount, type, source} of the filesystem that `path` lies on."""
    real, best = os.path.realpath(path), {"mount": "", "type": "", "source": ""}
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            left, _, right = line.partition(" - ")
            point = left.split()[4].replace("\\040", " ")
            inside = real == point or real.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best["mount"]):
                best = {"mount": point, "type": right.split()[0], "source": right.split()[1]}
    return best


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
        before = ((last or {}).get("filesystems") or {}).get(path)
        now = filesystem_of(path)
        if before and before["mount"] != now["mount"]:
            raise Refused(
                "source %s is not mounted: it was on %s (%s), what is there now belongs to %s; earlier sets untouched"
                % (path, before["mount"], before["source"], now["mount"])
            )
        had = ((last or {}).get("per_path") or {}).get(path, 0)
        if had and not os.listdir(path):
            raise Refused(
                "source %s is empty, the last backup holds %d files of it; earlier backups untouched" % (path, had)
            )


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


def estimate(paths: List[str], exclude: List[str], last: Optional[Dict[str, Any]]) -> Dict[str, Any]:
    """What the set needs: allocated blocks of each inode once, without what the last set already holds."""
    need, inodes, files, total = 0, 0, 0, 0
    per_path: Dict[str, int] = {}
    seen = set()
    for path in paths:
        count = 0
        for name, status in names_below(path, exclude):
            key = (status.st_dev, status.st_ino)
            count += 1
            if status.st_nlink > 1 and key in seen:
                continue
            if status.st_nlink > 1:
                seen.add(key)
            files, total = files + 1, total + status.st_size
            if not _held(name, status, last):
                need, inodes = need + status.st_blocks * 512, inodes + 1
        per_path[path] = count
    return {"need": need, "inodes": inodes, "files": files, "bytes": total, "per_path": per_path}


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
    if wanted["need"] * MARGIN > free:
        raise Refused("%s: needs %.0f MiB, %.0f MiB free" % (to, wanted["need"] / MIB, free / MIB))
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


# ------------------------------------------------------------------------------------------- copying, reading back


def copy(job: Job, partial: str, last: Optional[Dict[str, Any]]) -> bool:
    """One rsync pass into the partial set. True when files vanished meanwhile. Raises Refused, in words."""
    argv = list(RSYNC) + ["--exclude=" + _pattern(path) for path in job.get("exclude", [])]
    if last:
        argv.append("--link-dest=" + last["path"] + "/tree")
    argv += ["--", *list(job["paths"]), partial + "/tree/"]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False)
    if done.returncode in (0, VANISHED):
        return done.returncode == VANISHED
    said = done.stderr.decode("utf-8", "replace").strip()
    if "No space left on device" in said or done.returncode == 11:
        shutil.rmtree(partial, ignore_errors=True)  # a full disk hurts the host more than a lost half of a copy
    meaning = EXIT_CODES.get(done.returncode, "ended by signal %d" % -done.returncode)
    raise Refused("rsync ended with %d (%s): %s" % (done.returncode, meaning, _first_lines(said)))


def _pattern(path: str) -> str:
    """rsync's own wildcards in a name stand for themselves."""
    return "".join("\\" + char if char in "*?[\\" else char for char in path)


def _first_lines(text: str) -> str:
    return "; ".join(text.splitlines()[:3])[:600]


def manifest(job: Job, roots: List[List[str]], out: str, **more: Any) -> Dict[str, Any]:
    return hashing.run_job(dict({"roots": roots, "out": out, "exclude": job.get("exclude", [])}, **more))


def prove(job: Job, partial: str, last: Optional[Dict[str, Any]]) -> Dict[str, Any]:
    """Hash the source on its side and the copy by reading it back from the disk; returns how they compare."""
    subprocess.run(["sync", "-f", partial], check=False)
    source = job["work"] + "-source"
    sources = [[path, path] for path in job["paths"]]
    copies = [[partial + "/tree" + path, path] for path in job["paths"]]
    earlier = [source + ".jsonl", *list(job.get("previous", []))]
    manifest(job, sources, source, previous=earlier)
    linked = [last["path"] + "/manifest.jsonl"] if last and job.get("final") else []
    more = {"drop_cache": True, "previous": linked, "unmoved": LINKED}
    found = manifest(job, copies, partial + "/manifest", **more)
    return dict(found, compare=stream.compare(source + ".jsonl", partial + "/manifest.jsonl", ignore=("nlink",)))


def corrupt(found: Dict[str, Any]) -> str:
    """Why the copy is bad whatever the source did meanwhile, or ''."""
    result = found["compare"]
    if result["silent"]:
        return "hash differs though size and time are equal: %s" % ", ".join(result["names"]["mismatch"][:3])
    if found["unreadable"]:
        return "the copy cannot be read back: %s" % ", ".join(found["names"]["unreadable"][:3])
    return ""


def settle(job: Job, partial: str, last: Optional[Dict[str, Any]]) -> Tuple[Dict[str, Any], bool]:
    """Copy until source and copy are equal, at most PASSES times; what is still written then is counted as in flux."""
    vanished, found = False, {}  # type: Tuple[bool, Dict[str, Any]]
    for _ in range(PASSES):
        vanished = copy(job, partial, last) or vanished
        found = prove(job, partial, last)
        why = corrupt(found)
        if why:
            raise Refused(why)
        if found["compare"]["equal"] == found["compare"]["expected"] and not found["compare"]["extra"]:
            break
    return found, vanished


def make_set(job: Job) -> Dict[str, Any]:
    """The whole: look, copy, prove, and only then give the set its name. Raises Refused."""
    to, paths = job["to"], _real(checked_paths(job))
    job = dict(job, paths=paths)
    check_target(paths, to)
    to = job["to"] = os.path.realpath(to)
    last = last_set(to, job["name"])
    check_sources(paths, last)
    wanted = estimate(paths, job.get("exclude", []), last)
    check_shrink(wanted, last, float(job.get("allow_shrink", 50)))
    check_room(to, wanted)
    final = os.path.join(to, job["name"])
    partial = final + ".partial"
    refuse_links([final, partial, partial + "/tree"])
    os.makedirs(partial + "/tree", mode=0o700, exist_ok=True)
    began = time.time()
    found, vanished = settle(job, partial, last)
    result = found["compare"]
    described = {
        "name": job["name"],
        "paths": paths,
        "files": wanted["files"],
        "bytes": wanted["bytes"],
        "per_path": wanted["per_path"],
        "filesystems": {path: filesystem_of(path) for path in paths},
        "needed": wanted["need"],
        "linked_to": last["path"] if last else "",
        "content": found["content"],
        "manifest_sha256": found["jsonl_sha256"],
        "checked": result["checked"],
        "expected": result["expected"],
        "in_flux": result["expected"] - result["equal"] + result["extra"],
        "in_flux_names": [name for shown in result["names"].values() for name in shown][:10],
        "vanished": vanished,
        "began": began,
        "ended": time.time(),
    }
    _publish(described, partial, final)
    return described


def _real(paths: List[str]) -> List[str]:
    """A source that is a link would be copied as a link, and its copy compared with the source itself."""
    return sorted({os.path.realpath(path) for path in paths})


def _publish(described: Dict[str, Any], partial: str, final: str) -> None:
    with open(partial + "/set.json", "w", encoding="utf-8") as file:
        json.dump(described, file, sort_keys=True, indent=1)
        file.flush()
        os.fsync(file.fileno())
    replaced = final + ".replaced.partial"
    if os.path.exists(final):  # sealed again: the newer one counts
        os.rename(final, replaced)
    os.rename(partial, final)
    shutil.rmtree(replaced, ignore_errors=True)
    parent = os.open(os.path.dirname(final), os.O_RDONLY)
    os.fsync(parent)
    os.close(parent)


def main(path: str) -> int:
    os.umask(0o077)
    os.nice(10)  # the host serves meanwhile
    with open(path, encoding="utf-8") as file:
        job = json.load(file)
    try:
        print(json.dumps(make_set(job)))
    except (Refused, OSError, ValueError) as error:
        print(json.dumps({"failed": str(error)}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
