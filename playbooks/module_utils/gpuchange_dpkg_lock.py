"""Who works on a host's packages right now, and at what: the holder of dpkg's locks. Read-only."""

from __future__ import annotations

import fcntl
import glob
import os
import re
import struct
import time
from typing import Any, Dict, List, Optional

from ansible.module_utils.gpuchange_look import read_text

LOCKS = ("/var/lib/dpkg/lock-frontend", "/var/lib/dpkg/lock")
FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length, pid
SCRIPT = re.compile(r"/var/lib/dpkg/(?:info|tmp\.ci)/(\S+?)(?:\.(preinst|postinst|prerm|postrm|config))?(?=\s|$)")
SAMPLE_S = 0.3


def lock_holder() -> Optional[Dict[str, Any]]:
    """{pid, command, at} of the process that holds a lock of dpkg; None when nobody does."""
    for path in LOCKS:
        pid = _locked_by(path)
        if pid:
            return {"pid": pid, "command": command(pid), "at": at_work(pid)}
    return None


def await_lock(patience_s: float) -> Optional[Dict[str, Any]]:
    """Who still holds it after `patience_s` seconds, or None as soon as it is free."""
    deadline = time.monotonic() + patience_s
    while True:
        holder = lock_holder()
        if holder is None or time.monotonic() >= deadline:
            return holder
        time.sleep(0.5)


def said(holder: Dict[str, Any]) -> str:
    at = ", %s" % holder["at"] if holder["at"] else ""
    return "pid %d (%s%s)" % (holder["pid"], holder["command"] or "?", at)


def _locked_by(path: str) -> int:
    """The kernel's own answer: asking for a lock without taking it tells who has it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        asked = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack(FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
        return int(pid) if kind != fcntl.F_UNLCK else 0
    finally:
        os.close(descriptor)


def command(pid: int) -> str:
    return " ".join(read_text("/proc/%d/cmdline" % pid, 4096).split("\0")).strip()[:160]


def at_work(pid: int) -> str:
    """What a package operation is at: `in nvidia-dkms-570.postinst (pid 12), waiting for input`; "" when unknown."""
    family = descendants(pid)
    scripts = [(one, _script(command(one))) for one in family]
    named = [(one, script) for one, script in scripts if script]
    if not named:
        return ""
    waiting = ", waiting for input" if _idle(descendants(named[-1][0])) else ""
    return "in %s (pid %d)%s" % (named[-1][1], named[-1][0], waiting)


def _script(text: str) -> str:
    found = SCRIPT.search(text)
    return "%s.%s" % found.groups() if found and found.group(2) else ""


def descendants(pid: int) -> List[int]:
    """The process and all below it, parents first."""
    children: Dict[int, List[int]] = {}
    for path in glob.glob("/proc/[0-9]*/stat"):
        fields = read_text(path, 1024).rpartition(")")[2].split()
        if len(fields) > 1:
            children.setdefault(int(fields[1]), []).append(int(path.split("/")[2]))
    found, queue = [], [pid]
    while queue:
        one = queue.pop(0)
        found.append(one)
        queue += sorted(children.get(one, []))
    return found


def _idle(pids: List[int]) -> bool:
    """Whether all of them sleep and none gets any processor time: what runs a program waits for that one's end only."""
    before = _ticks(pids)
    time.sleep(SAMPLE_S)
    return before is not None and before == _ticks(pids)


def _ticks(pids: List[int]) -> Optional[List[str]]:
    rows = [read_text("/proc/%d/stat" % pid, 1024).rpartition(")")[2].split() for pid in pids]
    if any(len(row) < 13 or row[0] != "S" for row in rows):
        return None
    return [row[11] + "/" + row[12] for row in rows]
