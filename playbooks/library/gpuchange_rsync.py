#!/usr/bin/python3
"""Back up directories of a host into a new set beside the earlier ones, and prove it by reading it back."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpuchange_rsync
short_description: Make and prove a backup set with rsync
description:
  - Copies args.paths into a new set below args.to. Files that did not change are hard links into the last set.
  - The work runs as a host unit; the module reports running until it has ended.
  - A set has its name only when all of it was read back and compared with its source. Earlier sets are never touched.
  - probe tells whether this change's set is there and proved.
options:
  mode: {type: str, choices: [probe, apply, undo], required: true, description: What to do.}
  owner: {type: dict, required: true, description: "change, controller, fence, reason, ticket"}
  args: {type: dict, default: {}, description: "paths, to, exclude, allow_shrink"}
  step: {type: dict, default: {}, description: "phase, provider, direction"}
author: gpuchange
"""
EXAMPLES = "- gpuchange_rsync: {mode: apply, owner: '{{ gpuchange_owner }}', args: {paths: [/srv], to: /backup}}"
RETURN = "report: {type: dict, returned: always, description: 'state, why, set'}"

import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from typing import Any  # noqa: E402

from ansible.module_utils import (  # noqa: E402
    gpuchange_backup,
    gpuchange_hashing,
    gpuchange_manifest_stream,
)
from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible.module_utils.gpuchange_host import (  # noqa: E402
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
from ansible.module_utils.gpuchange_manifest import forget  # noqa: E402
from ansible.module_utils.gpuchange_unit import host_unit, install_script, unit_name, unit_state  # noqa: E402

STEP = "rsync"
WAIT_S = 30.0
DEADLINE_S = 48 * 3600.0


def finished_set(to: str, name: str) -> dict[str, Any] | None:
    """This change's proved set, described by itself; None when there is none."""
    try:
        described = read_json(os.path.join(to, name, "set.json"))
    except ValueError:
        return None
    return dict(described, path=os.path.join(to, name)) if isinstance(described, dict) else None


def start(module: AnsibleModule) -> dict[str, Any]:
    """Start the unit, or attach to it; its result."""
    args = args_of(module)
    job = {
        "paths": args["paths"],
        "exclude": args.get("exclude") or [],
        "to": args["to"],
        "name": change_of(module),
        "allow_shrink": args.get("allow_shrink", 50),
        "work": state_path(module, "backup"),
        "previous": [state_path(module, "record.jsonl")],
    }
    state_dir(module)
    write_atomic(state_path(module, "backup.job.json"), job)
    for beside in (gpuchange_manifest_stream, gpuchange_hashing):
        install_script(module, beside)
    script = install_script(module, gpuchange_backup)
    argv = [sys.executable, "-I", script, state_path(module, "backup.job.json")]
    return host_unit(module, STEP, argv, wait_s=WAIT_S, deadline_s=DEADLINE_S)


def failure(result: dict[str, Any]) -> str:
    """Why the unit failed, in its own last words."""
    lines = str(result.get("out", "")).strip().splitlines()
    try:
        return str(json.loads(lines[-1])["failed"])
    except (IndexError, ValueError, KeyError, TypeError):
        return "the backup program ended with %s: %s" % (result.get("rc"), " ".join(lines[-3:])[-400:])


def apply(module: AnsibleModule, to: str) -> None:
    if not is_executable("rsync"):
        finish(module, "not_done", why="rsync is not installed on this host")
    with owned(module):
        found = finished_set(to, change_of(module))
        if found:
            finish(module, "done", set=found)
        result = start(module)
        if result["state"] == "running":
            finish(module, "running", why="copying and reading back")
        forget(unit_name(module, STEP))  # the set itself says that it is done; a failed try may be repeated
    found = finished_set(to, change_of(module))
    if found:
        finish(module, "done", changed=True, set=found)
    if result["state"] == "lost":
        finish(module, "running", why="copying was interrupted; it goes on")
    finish(module, "not_done", why=failure(result))


def main() -> None:
    module = open_module()
    to = str(args_of(module).get("to") or "")
    if mode_of(module) == "undo":
        finish(module, "done", why="a backup is kept; there is nothing to undo")
    if not os.path.isabs(to):
        module.fail_json(msg="args.to must be an absolute path, not %r" % to)
    if mode_of(module) == "probe":
        found = finished_set(to, change_of(module))
        running = unit_state(unit_name(module, STEP))["state"] == "running"
        finish(module, "done" if found else "running" if running else "not_done", set=found or {})
    apply(module, to)


if __name__ == "__main__":
    main()
