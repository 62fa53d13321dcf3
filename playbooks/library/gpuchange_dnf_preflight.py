#!/usr/bin/python3
"""Would dnf make this host's GPU stack what the plan wants? Read-only: private metadata below /run, removed after."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpuchange_dnf_preflight
short_description: Choose and simulate a GPU stack change by dnf
description:
  - Fetches repository metadata into a private directory below /run, chooses the packages, has dnf simulate it.
  - Changes nothing and takes no owner marker; refuses a host that belongs to another change.
options:
  mode: {type: str, choices: [probe, apply, undo], required: true, description: What to do.}
  owner: {type: dict, required: true, description: "change, controller, fence, reason, ticket"}
  args: {type: dict, default: {}, description: "wanted: {component: version}"}
  step: {type: dict, default: {}, description: "phase, provider, direction"}
author: gpuchange
"""
EXAMPLES = (
    "- gpuchange_dnf_preflight: {mode: apply, owner: '{{ gpuchange_owner }}', args: {wanted: {driver: '570.172.08'}}}"
)
RETURN = "report: {type: dict, returned: always, description: 'state, as_wanted, before, after, moves, problems'}"

import os  # noqa: E402
import shutil  # noqa: E402
from typing import Any  # noqa: E402

from ansible.module_utils import gpuchange_dnf_unit  # noqa: E402
from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible.module_utils.gpuchange_dnf_call import interpreter  # noqa: E402
from ansible.module_utils.gpuchange_dnf_choice import PREFIXES  # noqa: E402
from ansible.module_utils.gpuchange_dnf_plan import examine  # noqa: E402
from ansible.module_utils.gpuchange_host import (  # noqa: E402
    args_of,
    change_of,
    finish,
    guard,
    mode_of,
    open_module,
    read_json,
    write_atomic,
)
from ansible.module_utils.gpuchange_unit import host_unit, install_script  # noqa: E402

RUN = "/run/gpuchange"


def fetch_offer(module: AnsibleModule, folder: str) -> dict[str, Any]:
    """What the repositories offer, through a private cache; ends the module while metadata is being fetched."""
    answer, job = os.path.join(folder, "offer.json"), os.path.join(folder, "offer.job")
    cache = os.path.join(folder, "cache")
    write_atomic(job, {"do": "offer", "prefixes": PREFIXES, "cache": cache, "answer": answer})
    argv = [interpreter(), "-I", install_script(module, gpuchange_dnf_unit, folder), job]
    done = host_unit(module, "offer", argv, deadline_s=900, folder=folder)
    if done["state"] == "running":
        finish(module, "running", why="repository metadata is being fetched")
    said = read_json(answer, {}) or {}
    return dict(said) if said else {"error": "it was interrupted" if done["state"] == "lost" else done["out"][-500:]}


def main() -> None:
    module = open_module()
    if mode_of(module) != "apply":
        finish(module, "not_done" if mode_of(module) == "probe" else "done", why="a look is simply taken again")
    guard(module)
    folder = os.path.join(RUN, change_of(module))
    os.makedirs(folder, mode=0o700, exist_ok=True)
    said = fetch_offer(module, folder)
    if "error" in said:
        body: dict[str, Any] = {"problems": ["repositories cannot be read: %s" % said["error"]]}
    else:
        body = examine(args_of(module)["wanted"], said["packages"], os.path.join(folder, "cache"))
    shutil.rmtree(folder, ignore_errors=True)
    problems = body["problems"]
    finish(module, "not_done" if problems else "done", why="; ".join(problems), **body)


if __name__ == "__main__":
    main()
