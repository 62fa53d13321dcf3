"""dnf's own library as gpuchange calls it: the script that needs it, run with the Python that has it."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import tempfile
from typing import Any, Dict

from ansible.module_utils import gpuchange_dnf_unit
from ansible.module_utils.gpuchange_host import read_text, run, write_atomic
from ansible.module_utils.gpuchange_look import PATH

CALL_TIMEOUT_S = 40
NO_JSON = "dnf said nothing that could be read: %s"


def interpreter() -> str:
    """The Python in the first line of dnf itself: its library is for that one alone."""
    path = shutil.which("dnf", path=PATH) or "/usr/bin/dnf"
    first = read_text(os.path.realpath(path), limit=256).split("\n")[0]
    words = first[2:].split() if first.startswith("#!") else []
    return words[0] if words else "/usr/bin/python3"


def ask(job: Dict[str, Any]) -> Dict[str, Any]:
    """A short job, answered at once: what it says, or {"error": why}. Leaves nothing behind."""
    os.makedirs("/run/gpuchange", mode=0o700, exist_ok=True)
    folder = tempfile.mkdtemp(dir="/run/gpuchange")
    try:
        path = os.path.join(folder, "job")
        write_atomic(path, {"cache": os.path.join(folder, "cache"), **job})
        source = inspect.getsource(gpuchange_dnf_unit)
        _, out, err = run([interpreter(), "-I", "-c", source, path], timeout=CALL_TIMEOUT_S, limit=8 * 1024 * 1024)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return answer_of(out, err)


def answer_of(out: str, err: str = "") -> Dict[str, Any]:
    lines = [line for line in out.splitlines() if line.startswith("{")]
    try:
        return dict(json.loads(lines[-1]))
    except (IndexError, ValueError):
        return {"error": NO_JSON % ((err or out).strip()[-300:] or "it was ended after %d s" % CALL_TIMEOUT_S)}
