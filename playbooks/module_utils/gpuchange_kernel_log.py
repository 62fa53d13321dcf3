"""The kernel's messages about GPUs and their bus, of this boot only, from whatever holds them on this host."""

from __future__ import annotations

import re
import time
from typing import Any, Dict, List

from ansible.module_utils.gpuchange_look import read_text, run

ABOUT_GPUS = re.compile(r"NVRM|nvidia|Xid|AER:|pcieport|mce:|EDAC|fallen off|out of memory|oom-kill", re.I)
LINES = 400


def since(epoch: float) -> Dict[str, Any]:
    """{source: journal | dmesg | "", text, why}: lines of this boot from `epoch` (host's clock) on, last ones kept.

    An empty source says that no kernel log can be read here, which is not the same as a quiet one.
    """
    for source, lines in (("journal", _journal), ("dmesg", _dmesg)):
        found = lines(epoch)
        if found is not None:
            return {"source": source, "text": "\n".join(found[-LINES:]), "why": ""}
    return {"source": "", "text": "", "why": "neither journalctl -k nor dmesg shows a kernel log on this host"}


def _journal(epoch: float) -> Any:
    """None when the journal holds no kernel message of this boot at all: then it does not receive them."""
    if not _said(["journalctl", "-k", "-b", "-n", "1", "-q", "--no-pager"]):
        return None
    asked = ["journalctl", "-k", "-b", "-q", "--no-pager", "-o", "short-monotonic", "--since", "@%d" % int(epoch)]
    return _relevant(_said(asked).splitlines())


def _dmesg(epoch: float) -> Any:
    """None when the ring buffer cannot be read. Its times are seconds since boot."""
    said = run(["dmesg"], 10.0, 1024 * 1024)
    if said["rc"] != 0 or not said["out"].strip():
        return None
    uptime = float((read_text("/proc/uptime") or "0").split()[0])
    begin = uptime - (time.time() - epoch)
    return _relevant(_from(said["out"].splitlines(), begin))


def _said(argv: List[str]) -> str:
    said = run(argv, 10.0, 1024 * 1024)
    return str(said["out"]) if said["rc"] == 0 else ""


def _from(lines: List[str], begin: float) -> List[str]:
    """Lines stamped `begin` or later; an unstamped line belongs to the one before it."""
    kept, keep = [], False
    for line in lines:
        stamp = re.match(r"\[\s*(\d+\.\d+)\]", line)
        keep = float(stamp.group(1)) >= begin if stamp else keep
        if keep:
            kept.append(line)
    return kept


def _relevant(lines: List[str]) -> List[str]:
    return [line for line in lines if ABOUT_GPUS.search(line)]
