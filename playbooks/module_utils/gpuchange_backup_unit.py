"""A backup set made by a host unit: started, attached to, and its outcome told by the set itself."""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Dict, NamedTuple, Tuple

from ansible.module_utils import (
    gpuchange_backup,
    gpuchange_backup_look,
    gpuchange_backup_set,
    gpuchange_tar,
    gpuchange_tar_read,
)
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpuchange_host import (
    args_of,
    change_of,
    finish,
    is_executable,
    mode_of,
    open_module,
    owned,
    read_json,
    state_dir,
    state_path,
    write_atomic,
)
from ansible.module_utils.gpuchange_manifest import PROGRAM, forget
from ansible.module_utils.gpuchange_unit import host_unit, install_script, unit_name, unit_state

DEADLINE_S = 48 * 3600.0
WAIT_S = 30.0


class Method(NamedTuple):
    """One way of making a set: its program with what lies beside it, where it works, how its sets are called."""

    program: Any
    beside: Tuple[Any, ...]
    work: str
    suffix: str
    keys: Tuple[str, ...] = ()


METHODS: Dict[str, Method] = {
    "rsync": Method(gpuchange_backup, (), "backup", ""),
    "tar": Method(gpuchange_tar, (gpuchange_tar_read,), "backup_tar", ".tar", ("compression", "may_change")),
}


def finished_set(to: str, name: str) -> dict[str, Any] | None:
    """A proved set as it describes itself, with its path; None when there is none."""
    try:
        described = read_json(os.path.join(to, name, "set.json"))
    except ValueError:
        return None
    return dict(described, path=os.path.join(to, name)) if isinstance(described, dict) else None


def backup_unit(
    module: AnsibleModule, wanted: dict[str, Any], name: str, wait_s: float, method: str = "rsync"
) -> dict[str, Any]:
    """Make the set `name`, or attach to the unit that does. Call it inside `owned(module)`.

    wanted: {paths, to, exclude, allow_shrink, final, and the method's own keys}.
    Returns {state: done | running | not_done, why, set}.
    """
    way = METHODS[method]
    job = state_path(module, way.work + ".job.json")
    state_dir(module)
    write_atomic(job, job_of(module, wanted, name, way))
    for beside in (*PROGRAM, gpuchange_backup_look, gpuchange_backup_set, *way.beside):
        install_script(module, beside)
    argv = [sys.executable, "-I", install_script(module, way.program), job]
    result = host_unit(module, method, argv, wait_s=wait_s, deadline_s=DEADLINE_S)
    if result["state"] == "running":
        return {"state": "running", "why": "copying and reading back"}
    forget(unit_name(module, method))  # the set itself says that it is done; a failed try may be repeated
    if result["state"] == "lost":
        return {"state": "running", "why": "copying was interrupted; it goes on"}
    made = finished_set(str(wanted["to"]), name) if result.get("rc") == 0 else None
    return {"state": "done", "why": "", "set": made} if made else {"state": "not_done", "why": failure(result)}


def job_of(module: AnsibleModule, wanted: dict[str, Any], name: str, way: Method) -> dict[str, Any]:
    job = {
        "paths": wanted["paths"],
        "exclude": wanted.get("exclude") or [],
        "to": wanted["to"],
        "name": name,
        "allow_shrink": wanted.get("allow_shrink", 50),
        "final": bool(wanted.get("final")),
        "work": state_path(module, way.work),
        "previous": [state_path(module, "record.jsonl")],
    }
    return dict(job, **{key: wanted.get(key) for key in way.keys})


def failure(result: dict[str, Any]) -> str:
    """Why the unit failed, in its own last words."""
    lines = str(result.get("out", "")).strip().splitlines()
    try:
        return str(json.loads(lines[-1])["failed"])
    except (IndexError, ValueError, KeyError, TypeError):
        return "the backup program ended with %s: %s" % (result.get("rc"), " ".join(lines[-3:])[-400:])


# ------------------------------------------------------------------------------------------- the modules


def answer(method: str) -> None:
    """The whole of a backup module: probe, apply and undo of one method's set."""
    module = open_module()
    to, name = str(args_of(module).get("to") or ""), change_of(module) + METHODS[method].suffix
    if mode_of(module) == "undo":
        finish(module, "done", why="a backup is kept; there is nothing to undo")
    if not os.path.isabs(to):
        module.fail_json(msg="args.to must be an absolute path, not %r" % to)
    if mode_of(module) == "probe":
        found, why = standing(to, name)
        running = unit_state(unit_name(module, method))["state"] == "running"
        finish(module, "done" if found else "running" if running else "not_done", set=found or {}, why=why)
    _apply(module, method, to, name)


def standing(to: str, name: str) -> tuple[dict[str, Any] | None, str]:
    """(the set if it is there and, by a look, as it was proved; why not)."""
    found = finished_set(to, name)
    why = gpuchange_tar.moved(found, found["path"]) if found and "archive" in found else ""
    return (None, why) if why else (found, "")


def _apply(module: AnsibleModule, method: str, to: str, name: str) -> None:
    args = args_of(module)
    packer = gpuchange_tar_read.PACKERS.get(str(args.get("compression") or "none"), ("",))[0]
    for program in filter(None, (method, packer)):
        if not is_executable(program):
            finish(module, "not_done", why="%s is not installed on this host" % program)
    with owned(module):
        before, _ = standing(to, name)
        if before and "archive" not in before:
            finish(module, "done", set=before)
        made = backup_unit(module, args, name, WAIT_S, method)  # it reads an archive that is there once more
    finish(module, made.pop("state"), changed="set" in made and made["set"] != before, **made)
