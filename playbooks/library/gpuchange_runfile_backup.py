#!/usr/bin/python3
"""Keeps the NVIDIA installers that lead forward and back on the host, each proven by sha256 and its own check."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpuchange_runfile_backup
short_description: Keep the installers of a driver change in the change's store on the host
description:
  - Copies the new installer, and that of the driver installed now, as a host unit, while the host serves.
  - Reads every copy back and runs its own integrity check.
options:
  mode: {type: str, choices: [probe, apply, undo], required: true, description: What to do.}
  owner: {type: dict, required: true, description: "change, controller, fence, reason, ticket"}
  args: {type: dict, default: {}, description: "transaction: {installer, previous}, not_obtainable"}
  step: {type: dict, default: {}, description: "phase, provider, direction"}
author: gpuchange
"""
EXAMPLES = "- gpuchange_runfile_backup: {mode: apply, owner: '{{ gpuchange_owner }}', args: '{{ gpuchange_args }}'}"
RETURN = "report: {type: dict, returned: always, description: 'state, kept, bytes, not_obtainable, problems, store'}"

import os  # noqa: E402
import re  # noqa: E402
import sys  # noqa: E402
from typing import Any, NoReturn  # noqa: E402

from ansible.module_utils import gpuchange_runfile_unit  # noqa: E402
from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible.module_utils.gpuchange_host import (  # noqa: E402
    args_of,
    finish,
    mode_of,
    open_module,
    owned,
    read_json,
    state_path,
    write_atomic,
)
from ansible.module_utils.gpuchange_runfile_look import MANIFEST, STORE  # noqa: E402
from ansible.module_utils.gpuchange_unit import (  # noqa: E402
    forget_unit,
    host_unit,
    install_script,
    unit_name,
    unit_state,
)


def apply(module: AnsibleModule, args: dict[str, Any]) -> NoReturn:
    change, store = args["transaction"], state_path(module, STORE)
    rows = {row["version"]: row for row in (change["previous"], change["installer"]) if row}
    with owned(module):
        os.makedirs(store, mode=0o700, exist_ok=True)
        name = unit_name(module, "keep")
        if unit_state(name)["state"] == "lost" or unit_state(name).get("rc"):
            forget_unit(name)  # copying may be repeated, and whole copies stay
        job = name.file("job")
        write_atomic(job, {"do": "keep", "store": store, "wanted": list(rows.values())})
        argv = [sys.executable, "-I", install_script(module, gpuchange_runfile_unit), job]
        done = host_unit(module, "keep", argv, wait_s=35.0, deadline_s=7200.0)
    if done["state"] == "running":
        finish(module, "running", why="installers are being kept (%s)" % done["unit"])
    if done["state"] == "lost":
        finish(module, "not_done", why="keeping the installers was interrupted (%s)" % done["unit"])
    files = read_json(os.path.join(store, MANIFEST), {}) or {}
    why = "; ".join(re.findall(r"ERROR: (.*)", done["out"])) or done["out"].strip()[-300:]
    finish(
        module,
        "not_done" if done["rc"] else "done",
        why=why if done["rc"] else "",
        changed=True,
        store=store,
        kept=len(files),
        bytes=sum(entry["size"] for entry in files.values()),
        not_obtainable=args.get("not_obtainable") or [],
    )


def probe(module: AnsibleModule) -> NoReturn:
    """Done only if the store was filled; one that was is proven again by apply, which costs little."""
    state = unit_state(unit_name(module, "keep"))["state"]
    finish(module, "running" if state == "running" else "not_done", why="the store of installers is looked at again")


def main() -> None:
    module = open_module()
    if mode_of(module) == "probe":
        probe(module)
    if mode_of(module) == "undo":
        finish(module, "done", why="kept installers stay until they are pruned")
    args = args_of(module)
    if not args.get("transaction"):
        finish(module, "unknown", why="preflight/runfile has not said what to keep")
    apply(module, args)


if __name__ == "__main__":
    main()
