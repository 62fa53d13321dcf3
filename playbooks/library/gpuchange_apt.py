#!/usr/bin/python3
"""Brings a host's GPU stack to the chosen packages (apply) or back to the recorded ones (undo)."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpuchange_apt
short_description: One apt transaction for the whole GPU stack, forward or back
description:
  - Installs from the change's package store, offline, in one transaction run as a host unit; holds and marks are kept.
  - Reboots at most once, and only if the loaded driver is not the wanted one although its module lies ready.
  - Looks first; a second call attaches to what runs and repeats nothing. A probe answers from the real state.
options:
  mode: {type: str, choices: [probe, apply, undo], required: true, description: What to do.}
  owner: {type: dict, required: true, description: "change, controller, fence, reason, ticket"}
  args:
    type: dict
    default: {}
    description: "transaction (from preflight), sealed, cuda_select, dkms_set_aside, deadline_s, generation"
  step: {type: dict, default: {}, description: "phase, provider, direction"}
author: gpuchange
"""
EXAMPLES = (
    "- gpuchange_apt: {mode: apply, owner: '{{ gpuchange_owner }}', args: {transaction: {install: {}, remove: []}}}"
)
RETURN = "report: {type: dict, returned: always, description: 'state, installed, driver, boot_id, holds, repaired'}"

from typing import Any, NoReturn  # noqa: E402

from ansible.module_utils import gpuchange_dkms  # noqa: E402
from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible.module_utils.gpuchange_alternatives import set_alternatives  # noqa: E402
from ansible.module_utils.gpuchange_apt_look import cuda_turn  # noqa: E402
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
from ansible.module_utils.gpuchange_packages import alternatives  # noqa: E402
from ansible.module_utils.gpuchange_stack import (  # noqa: E402
    BEFORE,
    Target,
    Walk,
    look_before,
)


def found_before(module: AnsibleModule, args: dict[str, Any]) -> dict[str, Any] | None:
    saved = read_json(state_path(module, BEFORE))
    return saved if saved is not None else args.get("sealed")


def apply(module: AnsibleModule, args: dict[str, Any]) -> NoReturn:
    with owned(module):
        before = read_json(state_path(module, BEFORE)) or save_once(state_path(module, BEFORE), look_before())
        walk = Walk(module, Target.forward(args["transaction"]), before)
        if args.get("dkms_set_aside"):
            moved = gpuchange_dkms.set_aside(state_dir(module))
            walk.repaired += ["dkms leftover %s set aside; a rollback puts it back" % name for name in moved]
        walk.packages()
        path = cuda_turn(args["transaction"]["mains"], alternatives(), bool(args.get("cuda_select")))
        failed = set_alternatives({"cuda": {"mode": "any", "value": path}} if path else {})
        if failed:
            walk.end("not_done", "; ".join(failed))
        walk.modules()
        walk.loaded()
        walk.end("done")


def undo(module: AnsibleModule, args: dict[str, Any]) -> NoReturn:
    """Back to the state saved before the first action (or sealed, if that is gone); neither means nothing was done."""
    with owned(module):
        before = found_before(module, args)
        if before is None:
            finish(module, "done", why="the stack was never touched")
        walk = Walk(module, Target.back(args["transaction"], before), before)
        walk.packages()
        gpuchange_dkms.put_back(state_dir(module))
        failed = set_alternatives(before["alternatives"])
        if failed:
            walk.end("not_done", "; ".join(failed))
        walk.modules()
        walk.loaded()
        walk.end("done")


def probe(module: AnsibleModule, args: dict[str, Any]) -> NoReturn:
    before = found_before(module, args)
    forward = direction_of(module) == "do"
    if before is None:
        finish(module, "not_done" if forward else "done", why="the stack was never touched")
    target = Target.forward(args["transaction"]) if forward else Target.back(args["transaction"], before)
    walk = Walk(module, target, before)
    walk.look()


def main() -> None:
    module = open_module()
    action = {"probe": probe, "apply": apply, "undo": undo}[mode_of(module)]
    args = args_of(module)
    if not args.get("transaction"):
        finish(module, "unknown", why="preflight/apt has not said which packages to install")
    action(module, args)


if __name__ == "__main__":
    main()
