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
import os
import shutil
import subprocess
import sys
import time
from typing import Any, Dict, List, Optional, Tuple

try:
    from ansible.module_utils import gpuchange_backup_look as looking
    from ansible.module_utils import gpuchange_backup_set as sets
    from ansible.module_utils import gpuchange_manifest_stream as stream
except ImportError:  # a program now: its copies lie beside it
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import gpuchange_backup_look as looking  # type: ignore[import-not-found,no-redef]
    import gpuchange_backup_set as sets  # type: ignore[import-not-found,no-redef]
    import gpuchange_manifest_stream as stream  # type: ignore[import-not-found,no-redef]

Job = Dict[str, Any]
RSYNC = ["rsync", "-aHAXS", "--numeric-ids", "--relative", "--delete", "--no-inc-recursive"]
RSYNC.append("--modify-window=-1")  # without it a change within the same second and of the same size is not copied
LINKED = ["kind", "size", "mtime_ns", "ino"]  # a new link moves a file's ctime, nothing else
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
    raise looking.Refused("rsync ended with %d (%s): %s" % (done.returncode, meaning, sets.first_lines(said)))


def _pattern(path: str) -> str:
    """rsync's own wildcards in a name stand for themselves."""
    return "".join("\\" + char if char in "*?[\\" else char for char in path)


def prove(job: Job, partial: str, last: Optional[Dict[str, Any]]) -> Dict[str, Any]:
    """Hash the source on its side and the copy by reading it back from the disk; returns how they compare."""
    subprocess.run(["sync", "-f", partial], check=False)
    source, before = sets.source_manifest(job)
    copies = [[partial + "/tree" + path, path] for path in job["paths"]]
    linked = [last["path"] + "/manifest.jsonl"] if last and job.get("final") else []
    more = {"drop_cache": True, "previous": linked, "unmoved": LINKED}
    found = sets.manifest(job, copies, partial + "/manifest", **more)
    result = stream.compare(source, partial + "/manifest.jsonl", ignore=("nlink",), before=before)
    return dict(found, compare=result)


def corrupt(found: Dict[str, Any]) -> str:
    """Why the copy is bad whatever the source did meanwhile, or ''."""
    if found["compare"]["damaged"]:
        return sets.damages(found["compare"]["damaged"])
    if found["unreadable"]:
        return "the copy cannot be read back: %s" % ", ".join(found["names"]["unreadable"][:3])
    return ""


def _forget_damaged(damaged: List[List[Any]], partial: str) -> None:
    """Take bad copies away: with the size and time of their source, rsync would take them for good in the next try."""
    if len(damaged) >= stream.SHOWN:  # not all of them are named
        shutil.rmtree(partial + "/tree", ignore_errors=True)
        return
    for name, _, copied in damaged:
        if copied:
            with contextlib.suppress(OSError):
                os.unlink(partial + "/tree" + name)


def settle(job: Job, partial: str, last: Optional[Dict[str, Any]]) -> Tuple[Dict[str, Any], bool]:
    """Copy until source and copy are equal, at most PASSES times; what is still written then is counted as in flux."""
    vanished, found = False, {}  # type: Tuple[bool, Dict[str, Any]]
    for _ in range(sets.PASSES):
        vanished = copy(job, partial, last) or vanished
        found = prove(job, partial, last)
        why = corrupt(found)
        if why:
            _forget_damaged(found["compare"]["damaged"], partial)
            raise looking.Refused(why)
        if sets.equal(found["compare"]):
            break
    return found, vanished


def make_set(job: Job) -> Dict[str, Any]:
    """The whole: look, copy, prove, and only then give the set its name. Raises Refused."""
    job, last = sets.looked(job, "rsync")
    to, paths = job["to"], job["paths"]
    wanted = looking.estimate(paths, job.get("exclude", []), last, sets.keeps_neither_holes_nor_links(to))
    looking.check_shrink(wanted, last, float(job.get("allow_shrink", 50)))
    looking.check_room(to, wanted)
    final = os.path.join(to, job["name"])
    partial = final + ".partial"
    looking.refuse_links([final, partial, partial + "/tree"])
    os.makedirs(partial + "/tree", mode=0o700, exist_ok=True)
    began = time.time()
    found, vanished = settle(job, partial, last)
    linked_to = last["path"] if last else ""
    described = sets.describe(job, wanted, found, began, method="rsync", linked_to=linked_to, vanished=vanished)
    sets.publish(described, partial, final)
    return described


if __name__ == "__main__":
    sys.exit(sets.program(sys.argv[1], make_set))
