#!/usr/bin/python3
"""The owner marker of a host: apply releases it at the end of a change, probe says whose it is."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpuchange_owner
short_description: Release or show the owner marker of a host
description:
  - apply takes our marker away; it is refused when the marker is another change's or a newer controller's.
  - With args.expect ({change, fence}) it takes that change's markers up to that fence away, whoever set them, and
    shuts its controllers up to that fence out, also where they left no marker; this is what unlock plays.
options:
  mode: {type: str, choices: [probe, apply, undo], required: true, description: What to do.}
  owner: {type: dict, required: true, description: "change, controller, fence, reason, ticket"}
  args: {type: dict, default: {}, description: "expect: what unlock was told to release"}
  step: {type: dict, default: {}, description: "phase, provider, direction"}
author: gpuchange
"""
EXAMPLES = "- gpuchange_owner: {mode: apply, owner: '{{ gpuchange_owner }}'}"
RETURN = "report: {type: dict, returned: always, description: 'state, released, marker'}"

import os  # noqa: E402
from typing import Any  # noqa: E402

from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible.module_utils.gpuchange_host import (  # noqa: E402
    args_of,
    finish,
    locked,
    mode_of,
    open_module,
    owner_path,
    read_owner,
    refuse,
    release_owner,
    remember_released,
    sync_directory,
)
from ansible.module_utils.gpuchange_unit import working  # noqa: E402
from ansible.module_utils.gpuchange_upgrades import give_back  # noqa: E402


def things() -> list[str]:
    """Things of this host with a marker of their own: servers that this balancer's HAProxy has out of service."""
    names = os.listdir(os.path.dirname(owner_path())) if os.path.isdir(os.path.dirname(owner_path())) else []
    return sorted(n[len("owner-") : -len(".json")] for n in names if n.startswith("owner-") and n.endswith(".json"))


def unlock(module: AnsibleModule, expected: dict[str, Any]) -> list[str]:
    """Release what the expected change has here up to the expected fence, and shut its controllers out for good.

    Refused while work of that change still runs here, or when a newer controller of it has been at work.
    """
    change, fence = str(expected["change"]), int(expected["fence"])
    markers = {thing: read_owner(thing) or {} for thing in ["", *things()]}
    ours = {thing: marker for thing, marker in markers.items() if marker.get("change") == change}
    for thing, marker in ours.items():
        if int(marker.get("fence", 0)) > fence:
            refuse(module, "stale", marker, thing)
    units = working(change)
    if units:
        why = "%s still works on this host (%s); nothing was done" % (change, ", ".join(units))
        module.fail_json(msg=why, refused={"kind": "working", "by": ours.get("", {})})
    remember_released(change, fence, str(module.params["owner"].get("controller")))  # first: a crash lets nobody in
    if "" in ours:
        give_back()  # whatever became of the change, its host's automatic upgrades are on again
    for thing in ours:
        os.unlink(owner_path(thing))
    sync_directory(os.path.dirname(owner_path()))
    return sorted(ours)


def main() -> None:
    module = open_module()
    if mode_of(module) == "probe":
        held = {thing: read_owner(thing) or {} for thing in things()}
        marker = read_owner() or {}
        finish(module, "not_done" if marker or held else "done", marker=marker, things=held)
    if mode_of(module) == "undo":
        finish(module, "done", released=False)
    expected = args_of(module).get("expect")
    with locked(module):
        if expected:
            gone = unlock(module, expected)
            finish(module, "done", released=bool(gone), things=gone, changed=True)
        released = release_owner(module)
        if released:
            give_back()
    finish(module, "done", released=released, changed=released)


if __name__ == "__main__":
    main()
