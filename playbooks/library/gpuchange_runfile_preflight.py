#!/usr/bin/python3
"""Would this NVIDIA .run installer make the host's driver what the plan wants? Read-only."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpuchange_runfile_preflight
short_description: Examine an NVIDIA .run installer and the host that it is meant for
description:
  - The file by sha256, its own check, its version and architecture; what on the host would stop it; the way back.
  - Changes nothing and takes no owner marker; refuses a host that belongs to another change.
options:
  mode: {type: str, choices: [probe, apply, undo], required: true, description: What to do.}
  owner: {type: dict, required: true, description: "change, controller, fence, reason, ticket"}
  args:
    type: dict
    default: {}
    description: "wanted: {driver, file, sha256, previous, module, dkms, options}"
  step: {type: dict, default: {}, description: "phase, provider, direction"}
author: gpuchange
"""
EXAMPLES = "- gpuchange_runfile_preflight: {mode: apply, owner: '{{ gpuchange_owner }}', args: '{{ gpuchange_args }}'}"
RETURN = "report: {type: dict, returned: always, description: 'state, as_wanted, before, after, problems, findings'}"

from ansible.module_utils.gpuchange_host import args_of, finish, guard, mode_of, open_module  # noqa: E402
from ansible.module_utils.gpuchange_runfile_plan import examine  # noqa: E402


def main() -> None:
    module = open_module()
    if mode_of(module) != "apply":
        finish(module, "not_done" if mode_of(module) == "probe" else "done", why="a look is simply taken again")
    guard(module)
    body = examine(args_of(module)["wanted"])
    problems = body["problems"]
    finish(module, "not_done" if problems else "done", why="; ".join(problems), **body)


if __name__ == "__main__":
    main()
