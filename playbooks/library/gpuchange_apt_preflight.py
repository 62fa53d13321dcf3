#!/usr/bin/python3
"""Would apt make this host's GPU stack what the plan wants? Read-only: private lists below /run, removed after."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpuchange_apt_preflight
short_description: Choose and simulate a GPU stack change by apt
description:
  - Fetches package lists into a private directory below /run, chooses the complete package set, simulates it.
  - Changes nothing and takes no owner marker; refuses a host that belongs to another change.
options:
  mode: {type: str, choices: [probe, apply, undo], required: true, description: What to do.}
  owner: {type: dict, required: true, description: "change, controller, fence, reason, ticket"}
  args:
    type: dict
    default: {}
    description: "wanted: {component: version or auto}, fits: {component: ranges}, cuda_select"
  step: {type: dict, default: {}, description: "phase, provider, direction"}
author: gpuchange
"""
EXAMPLES = (
    "- gpuchange_apt_preflight: {mode: apply, owner: '{{ gpuchange_owner }}', args: {wanted: {driver: '570.172.08'}}}"
)
RETURN = (
    "report: {type: dict, returned: always, description: 'state, as_wanted, before, after, moves, problems, findings'}"
)

import os  # noqa: E402
import shutil  # noqa: E402
from typing import Any  # noqa: E402

from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible.module_utils.gpuchange_apt_look import examine  # noqa: E402
from ansible.module_utils.gpuchange_apt_private import PrivateApt, unreadable  # noqa: E402
from ansible.module_utils.gpuchange_host import (  # noqa: E402
    args_of,
    change_of,
    finish,
    guard,
    mode_of,
    open_module,
)
from ansible.module_utils.gpuchange_unit import host_unit  # noqa: E402

RUN = "/run/gpuchange"


def fetch_lists(module: AnsibleModule, apt: PrivateApt, folder: str) -> str:
    """Bring the private lists up to date; ends the module while that runs. Returns why it failed, or ""."""
    argv = ["apt-get", "update", "-q"]
    done = host_unit(module, "lists", argv, deadline_s=900, env=apt.env, folder=folder)
    if done["state"] == "running":
        finish(module, "running", why="package lists are being fetched")
    if done["state"] == "lost":
        return "fetching package lists was interrupted"
    lines = unreadable(done["out"])
    if done["rc"] or lines:
        return "; ".join(lines[:4]) or done["out"].strip()[-500:]
    return ""


def main() -> None:
    module = open_module()
    if mode_of(module) != "apply":
        finish(module, "not_done" if mode_of(module) == "probe" else "done", why="a look is simply taken again")
    args = args_of(module)
    guard(module)
    folder = os.path.join(RUN, change_of(module))
    os.makedirs(folder, mode=0o700, exist_ok=True)
    apt = PrivateApt(os.path.join(folder, "apt"))
    why = fetch_lists(module, apt, folder)
    if why:
        body: dict[str, Any] = {"problems": ["package sources cannot be read: %s" % why]}
    else:
        body = examine(apt, args["wanted"], bool(args.get("cuda_select")), args.get("fits") or {})
    shutil.rmtree(folder, ignore_errors=True)
    problems = body["problems"]
    finish(module, "not_done" if problems else "done", why="; ".join(problems), **body)


if __name__ == "__main__":
    main()
