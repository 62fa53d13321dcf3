"""The hash manifest as a host unit. Making it is repeatable, so a unit's result is taken away once it is read."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

from ansible.module_utils import (
    gpuchange_checkpoints,
    gpuchange_data,
    gpuchange_hashing,
    gpuchange_json_stream,
    gpuchange_leftovers,
    gpuchange_manifest_stream,
    gpuchange_pickle_look,
    gpuchange_sums,
    gpuchange_walk,
)
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpuchange_host import read_json, state_dir, state_path, write_atomic
from ansible.module_utils.gpuchange_unit import UnitName, host_unit, install_script, unit_name

STEP = "manifest"
PROGRAM = (gpuchange_manifest_stream, gpuchange_walk, gpuchange_hashing)
DATA = (gpuchange_json_stream, gpuchange_pickle_look, gpuchange_checkpoints, gpuchange_leftovers, gpuchange_sums)
DEADLINE_S = 24 * 3600.0


def manifest_unit(module: AnsibleModule, wanted: dict[str, Any], wait_s: float) -> dict[str, Any]:
    """Make the manifest `wanted["name"]`, or attach to the unit that does.

    wanted: {name, paths | roots, previous: [names], compare: name, compare_sha256, exclude, threads, drop_cache,
    sums: [{file, below}], inspect}.
    Returns {state: done | running | unknown, why, summary, progress}. Call it inside `owned(module)`.
    """
    os.makedirs(state_dir(module), mode=0o700, exist_ok=True)
    job = state_path(module, "%s.job.json" % wanted["name"])
    write_atomic(job, job_of(module, wanted))
    for beside in (*PROGRAM, *DATA):
        install_script(module, beside)
    script = install_script(module, gpuchange_data)
    result = host_unit(module, STEP, [sys.executable, "-I", script, job], wait_s=wait_s, deadline_s=DEADLINE_S)
    if result["state"] == "running":
        progress = _progress(state_path(module, wanted["name"]) + ".progress")
        return {"state": "running", "why": progress_line(progress), "progress": progress}
    forget(unit_name(module, STEP))
    if result["state"] == "lost":  # a reboot or power cut ended it; what it had read is kept and used
        return {"state": "running", "why": "hashing was interrupted; it goes on"}
    return _summary(result, state_path(module, wanted["name"]) + ".summary.json")


def job_of(module: AnsibleModule, wanted: dict[str, Any]) -> dict[str, Any]:
    """The job file: names become paths in the change's state directory."""
    roots = wanted.get("roots") or [[path, path] for path in wanted.get("paths", [])]
    compare = wanted.get("compare")
    return {
        "roots": roots,
        "out": state_path(module, wanted["name"]),
        "previous": [state_path(module, name + ".jsonl") for name in wanted.get("previous", [])],
        "compare": state_path(module, compare + ".jsonl") if compare else None,
        "compare_sha256": wanted.get("compare_sha256", ""),
        "exclude": [*list(wanted.get("exclude", [])), "/var/lib/gpuchange"],
        "threads": wanted.get("threads") or 0,
        "drop_cache": bool(wanted.get("drop_cache")),
        "sums": list(wanted.get("sums") or []),
        "inspect": bool(wanted.get("inspect")),
    }


def forget(name: UnitName) -> None:
    """Take the unit's result away, so that asking again works again."""
    for path in (name.result, name.begun, name.file("spec"), name.file("log")):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def progress_line(progress: dict[str, Any]) -> str:
    if not progress:
        return "hashing"
    return "hashing: %d files, %.1f GiB so far, %.0f MiB/s" % (
        progress.get("files", 0),
        progress.get("bytes", 0) / 1024.0**3,
        progress.get("rate", 0) / 1024.0**2,
    )


def _progress(path: str) -> dict[str, Any]:
    try:
        found = read_json(path, {})
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _summary(result: dict[str, Any], path: str) -> dict[str, Any]:
    if result.get("rc") == 0:
        return {"state": "done", "why": "", "summary": read_json(path)}
    tail = str(result.get("out", "")).strip().splitlines()[-1:]
    try:
        why = json.loads(tail[0])["failed"]
    except (IndexError, ValueError, KeyError, TypeError):
        why = "the hashing program ended with %s: %s" % (result.get("rc"), "".join(tail)[-300:])
    return {"state": "unknown", "why": why}
