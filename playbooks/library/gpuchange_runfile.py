#!/usr/bin/python3
"""Brings a host's driver to the version of an NVIDIA .run installer (apply) or back to what was there (undo)."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpuchange_runfile
short_description: One run of NVIDIA's installer, forward or back
description:
  - Runs the installer that the change keeps on the host, as a host unit; the earlier one, or its removal, leads back.
  - Reboots at most once, and only if the loaded driver is not the wanted one although its module lies ready.
  - Looks first; a second call attaches to what runs and repeats nothing. A probe answers from the real state.
options:
  mode: {type: str, choices: [probe, apply, undo], required: true, description: What to do.}
  owner: {type: dict, required: true, description: "change, controller, fence, reason, ticket"}
  args:
    type: dict
    default: {}
    description: "transaction (from preflight), dkms_set_aside, deadline_s, generation"
  step: {type: dict, default: {}, description: "phase, provider, direction"}
author: gpuchange
"""
EXAMPLES = "- gpuchange_runfile: {mode: apply, owner: '{{ gpuchange_owner }}', args: '{{ gpuchange_args }}'}"
RETURN = "report: {type: dict, returned: always, description: 'state, installed, libraries, driver, boot_id, repaired'}"

from typing import Any, NoReturn  # noqa: E402

from ansible.module_utils import gpuchange_dkms  # noqa: E402
from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible.module_utils.gpuchange_host import (  # noqa: E402
    args_of,
    direction_of,
    finish,
    mode_of,
    open_module,
    owned,
    read_json,
    save_once,
    state_dir,
    state_path,
)
from ansible.module_utils.gpuchange_runfile_walk import BEFORE, Goal, RunfileWalk, look_before  # noqa: E402

NEVER = "the driver was never touched"


def apply(module: AnsibleModule, args: dict[str, Any]) -> NoReturn:
    change = args["transaction"]
    with owned(module):
        before = read_json(state_path(module, BEFORE)) or save_once(state_path(module, BEFORE), look_before())
        walk = RunfileWalk(module, Goal.forward(change), before, change["options"])
        if args.get("dkms_set_aside"):
            moved = gpuchange_dkms.set_aside(state_dir(module))
            walk.repaired += ["dkms leftover %s set aside; a rollback puts it back" % name for name in moved]
        carry_out(walk)


def undo(module: AnsibleModule, args: dict[str, Any]) -> NoReturn:
    """Back to the state saved before the first action; none saved means nothing was done."""
    change = args["transaction"]
    with owned(module):
        before = read_json(state_path(module, BEFORE))
        if before is None:
            finish(module, "done", why=NEVER)
        walk = RunfileWalk(module, Goal.back(change, before), before, change["options"])
        gpuchange_dkms.put_back(state_dir(module))
        carry_out(walk)


def carry_out(walk: RunfileWalk) -> NoReturn:
    walk.files()
    walk.modules()
    walk.loaded()
    walk.end("done")


def probe(module: AnsibleModule, args: dict[str, Any]) -> NoReturn:
    change, before = args["transaction"], read_json(state_path(module, BEFORE))
    forward = direction_of(module) == "do"
    if before is None:
        finish(module, "not_done" if forward else "done", why=NEVER)
    goal = Goal.forward(change) if forward else Goal.back(change, before)
    RunfileWalk(module, goal, before, change["options"]).look()


def main() -> None:
    module = open_module()
    action = {"probe": probe, "apply": apply, "undo": undo}[mode_of(module)]
    args = args_of(module)
    if not args.get("transaction"):
        finish(module, "unknown", why="preflight/runfile has not said what to install")
    action(module, args)


if __name__ == "__main__":
    main()
