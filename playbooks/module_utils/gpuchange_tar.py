"""Makes one backup set with GNU tar and proves it by reading it back. A program of a host unit; standard library only.

Usage: gpuchange_tar.py JOB.json, with
  paths, exclude    absolute paths on this host
  to, name          the set is <to>/<name>/: archive.tar[.gz|.zst], archive.sha256, set.json, manifest.jsonl, .sha256
  compression       none | gzip | zstd
  may_change        paths at or below which files may change meanwhile: told, not refused
  allow_shrink      percent by which files or bytes may be fewer than in the last set
  work, previous    prefix for the source's manifest; manifests of the source that spare reading unmoved files
The set is built as <name>.partial and gets its name only when every file of the archive was read back from the disk and
equals its source. Half an archive is of no use to the next try: it is taken away. A set that is there already is read
again; one that was damaged since is made anew.
The last line of the output is JSON: the set's summary, or {"failed": why}.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from typing import IO, Any, Dict, List, Optional, Tuple

try:
    from ansible.module_utils import gpuchange_backup_look as looking
    from ansible.module_utils import gpuchange_backup_set as sets
    from ansible.module_utils import gpuchange_manifest_stream as stream
    from ansible.module_utils import gpuchange_tar_read as reading
except ImportError:  # a program now: its copies lie beside it
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import gpuchange_backup_look as looking  # type: ignore[import-not-found,no-redef]
    import gpuchange_backup_set as sets  # type: ignore[import-not-found,no-redef]
    import gpuchange_manifest_stream as stream  # type: ignore[import-not-found,no-redef]
    import gpuchange_tar_read as reading  # type: ignore[import-not-found,no-redef]

Job = Dict[str, Any]
TAR = ["tar", "--create", "--file=-", "--format=posix", "--pax-option=delete=atime,delete=ctime", "--sort=name"]
TAR += ["--sparse", "--acls", "--xattrs", "--numeric-owner", "--quoting-style=escape"]
CHANGED = re.compile(r"tar: (.*): (?:file changed as we read it|File removed before we read it|File shrank by .*)")
CHANGED_CODE = 1  # a file changed while it was read; 2 is fatal
NOT_KEPT = ("socket",)  # tar leaves them out: a socket is its program's, no data
HEADERS = 4096  # bytes of headers and padding a name, at most
IGNORED = ("nlink", "xattr")  # not in a tar header as the manifest has them; attributes are compared in the sample


# ------------------------------------------------------------------------------------------- writing


def argv_of(job: Job, names: str) -> List[str]:
    """Names are handed over in a file, ended by NUL: neither a newline nor a leading dash in them means anything."""
    argv = [*TAR, "--selinux"] if os.path.isdir("/sys/fs/selinux") else list(TAR)
    argv += ["--anchored", "--no-wildcards", *("--exclude=" + path[1:] for path in job.get("exclude", []))]
    return [*argv, "--directory=/", "--null", "--verbatim-files-from", "--files-from=" + names]


def write(job: Job, partial: str) -> Tuple[str, List[str]]:
    """One pass of tar into the archive, on the disk when this ends: (its sha256, names that changed meanwhile)."""
    with open(partial + "/names", "wb") as file:
        file.write(b"".join(stream.to_bytes(path)[1:] + b"\0" for path in job["paths"]))
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as packer_said:
        running = _start(job, partial + "/names", said, packer_said)
        try:
            digest = _pour(running[-1].stdout, partial + "/" + archive_name(job))
        except BaseException:
            for process in running:
                process.kill()
            raise
        finally:
            for process in running:
                process.wait()
        os.unlink(partial + "/names")
        return digest, _outcome(running, _text(said), _text(packer_said))


def archive_name(job: Job) -> str:
    return "archive.tar" + reading.PACKERS[job["compression"]][2]


def _start(job: Job, names: str, said: IO[bytes], packer_said: IO[bytes]) -> List["subprocess.Popen[bytes]"]:
    env, pipe = dict(os.environ, LC_ALL="C"), subprocess.PIPE  # its sentences are read
    tar = subprocess.Popen(argv_of(job, names), stdin=subprocess.DEVNULL, stdout=pipe, stderr=said, env=env)
    program, argv, _ = reading.PACKERS[job["compression"]]
    if not program:
        return [tar]
    try:
        packer = subprocess.Popen(argv, stdin=tar.stdout, stdout=pipe, stderr=packer_said)
    except OSError:
        tar.kill()
        tar.wait()
        raise
    if tar.stdout:
        tar.stdout.close()  # the packer's end is the only one: when it dies, tar ends too
    return [tar, packer]


def _pour(source: Optional[IO[bytes]], path: str) -> str:
    total = hashlib.sha256()
    with open(path, "wb") as out:
        while source:
            data = source.read(reading.CHUNK)
            if not data:
                source.close()
                break
            total.update(data)
            out.write(data)
        out.flush()
        os.fsync(out.fileno())
    return total.hexdigest()


def _outcome(running: List["subprocess.Popen[bytes]"], said: str, packer_said: str) -> List[str]:
    """The names that changed. Raises Refused for everything worse than that."""
    for process in running[1:]:
        if process.returncode:
            words = (process.args[0], process.returncode, sets.first_lines(packer_said))  # type: ignore[index]
            raise looking.Refused("%s ended with %d: %s" % words)
    code = running[0].returncode
    if code not in (0, CHANGED_CODE):
        meaning = "fatal error" if code == 2 else "ended by signal %d" % -code if code < 0 else "unknown"
        raise looking.Refused("tar ended with %d (%s): %s" % (code, meaning, sets.first_lines(said)))
    names = ["/" + match[1] for match in map(CHANGED.fullmatch, said.splitlines()) if match]
    if code == CHANGED_CODE and not names:
        raise looking.Refused("tar ended with 1, and named no file that changed: %s" % sets.first_lines(said))
    return names


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(1 << 20).decode("utf-8", "replace")


# ------------------------------------------------------------------------------------------- reading back


def prove(job: Job, partial: str, written: str) -> Dict[str, Any]:
    """Hash the source on its side, read the archive from the disk, and say how they compare. Raises Refused."""
    source, before = sets.source_manifest(job)
    kept = job["work"] + "-kept.jsonl"
    left_out = reading.without(source, kept, NOT_KEPT)
    found = reading.read_back(partial + "/" + archive_name(job), job["compression"], source, partial + "/manifest")
    if found["archive_sha256"] != written:
        words = (written, found["archive_sha256"], archive_name(job))
        raise looking.Refused("hash differs: written %.16s, read back %.16s (%s)" % words)
    result = stream.compare(kept, partial + "/manifest.jsonl", ignore=IGNORED, before=before)
    if result["damaged"]:
        raise looking.Refused(sets.damages(result["damaged"]))
    return dict(found, compare=result, sockets=left_out, required=_required(job, kept, partial, result))


def _required(job: Job, kept: str, partial: str, result: Dict[str, Any]) -> Dict[str, Any]:
    """The comparison without what the plan lets change."""
    paths = tuple(job.get("may_change") or ())
    if not paths or sets.equal(result):
        return result
    pair = [job["work"] + "-required.jsonl", job["work"] + "-archived.jsonl"]
    for manifest, out in zip((kept, partial + "/manifest.jsonl"), pair):
        reading.without(manifest, out, NOT_KEPT, paths)
    again = stream.compare(*pair, ignore=IGNORED)
    for out in pair:
        os.unlink(out)
    return again


def settle(job: Job, partial: str) -> Dict[str, Any]:
    """Archive until it equals the source. Raises Refused for what still changes in the last pass."""
    changed: List[str] = []
    found: Dict[str, Any] = {}
    for _ in range(sets.PASSES):
        written, names = write(job, partial)
        changed += names
        found = prove(job, partial, written)
        if sets.equal(found["required"]):
            return dict(found, changed=list(dict.fromkeys(changed)))
    names = [name for kind in ("mismatch", "unreadable", "missing", "extra", "metadata") for name in _of(found, kind)]
    more = "; and more" if len(names) > 3 else ""
    raise looking.Refused(
        "changed during backup: %s (required)%s: backup not usable without snapshot; stop what writes, or name under "
        "may_change or exclude what need not be kept" % (", ".join(names[:3]), more)
    )


def _of(found: Dict[str, Any], kind: str) -> List[str]:
    return list(found["required"]["names"].get(kind, []))


# ------------------------------------------------------------------------------------------- the set


def moved(described: Dict[str, Any], folder: str) -> str:
    """Whether the archive is, by a look only, the file that was proved: '' or how it differs."""
    try:
        status = os.stat(os.path.join(folder, described["archive"]))
    except OSError as error:
        return "the archive cannot be found: %s" % error
    now = {"size": status.st_size, "mtime_ns": status.st_mtime_ns}
    return "" if now == described["archive_is"] else "the archive was written to since it was proved"


def damaged(described: Dict[str, Any], folder: str) -> str:
    """Whether the archive still has the hash that it was proved with, by reading all of it: '' or how it differs."""
    why = moved(described, folder)
    if why:
        return why
    with open(os.path.join(folder, described["archive"]), "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        source = reading.Hashed(file)
        while source.read():
            pass
    found = source.total.hexdigest()
    proved = described["archive_sha256"]
    return "" if found == proved else "hash differs: proved %.16s, read now %.16s" % (proved, found)


def made_before(job: Job, final: str) -> Tuple[Optional[Dict[str, Any]], str]:
    """(the set of this name if it is there and still good, why one that is there is not)."""
    try:
        with open(final + "/set.json", encoding="utf-8") as file:
            described = json.load(file)
        why = damaged(described, final)
    except FileNotFoundError:
        return None, ""
    except (OSError, ValueError, KeyError, TypeError) as error:
        return None, str(error)
    return (None, why) if why else (described, "")


def room_for(job: Job) -> Dict[str, Any]:
    """What the archive needs as if nothing could be compressed, with the sample that is restored."""
    plain = sets.keeps_neither_holes_nor_links(job["to"])
    wanted = looking.estimate(job["paths"], job.get("exclude", []), None)
    extra = HEADERS * sum(wanted["per_path"].values()) + min(wanted["bytes"], reading.SAMPLE_BYTES)
    return dict(wanted, need=wanted["need"] + extra, inodes=reading.SAMPLE + 8, plain=plain)


def make_set(job: Job) -> Dict[str, Any]:
    """The whole: look, archive, prove, and only then give the set its name. Raises Refused."""
    job, last = sets.looked(dict(job, compression=job.get("compression") or "none"), "tar")
    _refuse_excluded(job)
    final = os.path.join(job["to"], job["name"])
    partial = final + ".partial"
    looking.refuse_links([final, partial])
    shutil.rmtree(partial, ignore_errors=True)  # half of an earlier try
    found, why = made_before(job, final)
    if found:
        return found
    wanted = room_for(job)
    looking.check_shrink(wanted, last, float(job.get("allow_shrink", 50)))
    looking.check_room(job["to"], wanted)
    os.makedirs(partial, mode=0o700)
    try:
        described = _made(job, partial, wanted, why)
        sets.publish(described, partial, final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return described


def _made(job: Job, partial: str, wanted: Dict[str, Any], replaces: str) -> Dict[str, Any]:
    began, archive = time.time(), archive_name(job)
    found = settle(job, partial)
    path = partial + "/" + archive
    sampled = reading.restored(path, job["compression"], found["sample"], partial + "/scratch")
    with open(partial + "/archive.sha256", "w", encoding="ascii") as file:
        file.write("%s  %s\n" % (found["archive_sha256"], archive))
        file.flush()
        os.fsync(file.fileno())
    status = os.stat(path)
    more = {
        "method": "tar",
        "archive": archive,
        "archive_sha256": found["archive_sha256"],
        "archive_is": {"size": status.st_size, "mtime_ns": status.st_mtime_ns},
        "compression": job["compression"],
        "restored": sampled,
        "sockets": found["sockets"],
        "changed": found["changed"][:10],
        "replaces": replaces,
    }
    return sets.describe(job, wanted, found, began, **more)


def _refuse_excluded(job: Job) -> None:
    for path in job["paths"]:
        above = [left_out for left_out in job.get("exclude", []) if (path + "/").startswith(left_out + "/")]
        if above:
            raise looking.Refused("source %s is excluded by %s" % (path, above[0]))
        if any((path + "/").startswith(other + "/") for other in job["paths"] if other != path):
            raise looking.Refused("source %s lies inside of another source and would be kept twice" % path)


if __name__ == "__main__":
    sys.exit(sets.program(sys.argv[1], make_set))
