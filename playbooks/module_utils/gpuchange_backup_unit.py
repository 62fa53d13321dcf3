"""A backup set made by a host unit: started, attached to, and its outcome told by the set itself."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from ansible.module_utils import gpuchange_backup, gpuchange_backup_look
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpuchange_host import read_json, state_dir, state_path, write_atomic
from ansible.module_utils.gpuchange_manifest import PROGRAM, forget
from ansible.module_utils.gpuchange_unit import host_unit, install_script, unit_name

STEP = "rsync"
DEADLINE_S = 48 * 3600.0


def finished_set(to: str, name: str) -> dict[str, Any] | None:
    """A proved set as it describes itself, with its path; None when there is none."""
    try:
        described = read_json(os.path.join(to, name, "set.json"))
    except ValueError:
        return None
    return dict(described, path=os.path.join(to, name)) if isinstance(described, dict) else None


def backup_unit(module: AnsibleModule, wanted: dict[str, Any], name: str, wait_s: float) -> dict[str, Any]:
    """Make the set `name`, or attach to the unit that does. Call it inside `owned(module)`.

    wanted: {paths, to, exclude, allow_shrink, final}. Returns {state: done | running | not_done, why, set}.
    """
    job = state_path(module, "backup.job.json")
    state_dir(module)
    write_atomic(job, job_of(module, wanted, name))
    for beside in (*PROGRAM, gpuchange_backup_look):
        install_script(module, beside)
    argv = [sys.executable, "-I", install_script(module, gpuchange_backup), job]
    result = host_unit(module, STEP, argv, wait_s=wait_s, deadline_s=DEADLINE_S)
    if result["state"] == "running":
        return {"state": "running", "why": "copying and reading back"}
    forget(unit_name(module, STEP))  # the set itself says that it is done; a failed try may be repeated
    if result["state"] == "lost":
        return {"state": "running", "why": "copying was interrupted; it goes on"}
    made = finished_set(str(wanted["to"]), name) if result.get("rc") == 0 else None
    return {"state": "done", "why": "", "set": made} if made else {"state": "not_done", "why": failure(result)}


def job_of(module: AnsibleModule, wanted: dict[str, Any], name: str) -> dict[str, Any]:
    return {
        "paths": wanted["paths"],
        "exclude": wanted.get("exclude") or [],
        "to": wanted["to"],
        "name": name,
        "allow_shrink": wanted.get("allow_shrink", 50),
        "final": bool(wanted.get("final")),
        "work": state_path(module, "backup"),
        "previous": [state_path(module, "record.jsonl")],
    }


def failure(result: dict[str, Any]) -> str:
    """Why the unit failed, in its own last words."""
    lines = str(result.get("out", "")).strip().splitlines()
    try:
        return str(json.loads(lines[-1])["failed"])
    except (IndexError, ValueError, KeyError, TypeError):
        return "the backup program ended with %s: %s" % (result.get("rc"), " ".join(lines[-3:])[-400:])
