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

import os  # noqa: E402

from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible.module_utils.gpuchange_backup_unit import STEP, backup_unit, finished_set  # noqa: E402
from ansible.module_utils.gpuchange_host import (  # noqa: E402
    args_of,
    change_of,
    finish,
    is_executable,
    mode_of,
    open_module,
    owned,
)
from ansible.module_utils.gpuchange_unit import unit_name, unit_state  # noqa: E402

WAIT_S = 30.0


def apply(module: AnsibleModule, to: str) -> None:
    if not is_executable("rsync"):
        finish(module, "not_done", why="rsync is not installed on this host")
    with owned(module):
        found = finished_set(to, change_of(module))
        if found:
            finish(module, "done", set=found)
        made = backup_unit(module, args_of(module), change_of(module), WAIT_S)
    finish(module, made.pop("state"), changed="set" in made, **made)


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
