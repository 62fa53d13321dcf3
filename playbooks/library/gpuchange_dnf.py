#!/usr/bin/python3
"""Brings a host's GPU stack to the chosen RPMs (apply) or back to the recorded ones (undo)."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpuchange_dnf
short_description: One dnf transaction for the whole GPU stack, forward or back
description:
  - Installs from the change's package store, offline, in one transaction run as a host unit; version locks are kept.
  - Reboots at most once, and only if the loaded driver is not the wanted one although its module lies ready.
  - Looks first; a second call attaches to what runs and repeats nothing. A probe answers from the real state.
options:
  mode: {type: str, choices: [probe, apply, undo], required: true, description: What to do.}
  owner: {type: dict, required: true, description: "change, controller, fence, reason, ticket"}
  args:
    type: dict
    default: {}
    description: "transaction (from preflight), cuda_select, dkms_set_aside, deadline_s, generation"
  step: {type: dict, default: {}, description: "phase, provider, direction"}
author: gpuchange
"""
EXAMPLES = (
    "- gpuchange_dnf: {mode: apply, owner: '{{ gpuchange_owner }}', args: {transaction: {install: {}, remove: []}}}"
)
RETURN = "report: {type: dict, returned: always, description: 'state, installed, driver, boot_id, holds, repaired'}"

from typing import Any, NoReturn  # noqa: E402

from ansible.module_utils import gpuchange_dkms  # noqa: E402
from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible.module_utils.gpuchange_dnf_walk import BEFORE, DnfWalk, look_before  # noqa: E402
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
from ansible.module_utils.gpuchange_stack import Target  # noqa: E402

NEVER = "the stack was never touched"


def apply(module: AnsibleModule, args: dict[str, Any]) -> NoReturn:
    with owned(module):
        before = read_json(state_path(module, BEFORE)) or save_once(state_path(module, BEFORE), look_before())
        walk = DnfWalk(module, Target.forward(args["transaction"]), before)
        if args.get("dkms_set_aside"):
            moved = gpuchange_dkms.set_aside(state_dir(module))
            walk.repaired += ["dkms leftover %s set aside; a rollback puts it back" % name for name in moved]
        carry_out(walk)


def undo(module: AnsibleModule, args: dict[str, Any]) -> NoReturn:
    """Back to the state saved before the first action; none saved means nothing was done."""
    with owned(module):
        before = read_json(state_path(module, BEFORE))
        if before is None:
            finish(module, "done", why=NEVER)
        walk = DnfWalk(module, Target.back(args["transaction"], before), before)
        gpuchange_dkms.put_back(state_dir(module))
        carry_out(walk)


def carry_out(walk: DnfWalk) -> NoReturn:
    walk.packages()
    walk.modules()
    walk.loaded()
    walk.end("done")


def probe(module: AnsibleModule, args: dict[str, Any]) -> NoReturn:
    before, forward = read_json(state_path(module, BEFORE)), direction_of(module) == "do"
    if before is None:
        finish(module, "not_done" if forward else "done", why=NEVER)
    target = Target.forward(args["transaction"]) if forward else Target.back(args["transaction"], before)
    DnfWalk(module, target, before).look()


def main() -> None:
    module = open_module()
    action = {"probe": probe, "apply": apply, "undo": undo}[mode_of(module)]
    args = args_of(module)
    if not args.get("transaction"):
        finish(module, "unknown", why="preflight/dnf has not said which packages to install")
    action(module, args)


if __name__ == "__main__":
    main()
