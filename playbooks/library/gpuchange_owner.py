#!/usr/bin/python3
"""The owner marker of a host: apply releases it at the end of a change, probe says whose it is."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpuchange_owner
short_description: Release or show the owner marker of a host
description:
  - apply takes our marker away; it is refused when the marker is another change's or a newer controller's.
  - With args.expect ({change, fence}) it releases exactly that marker, whoever set it; this is what unlock plays.
options:
  mode: {type: str, choices: [probe, apply, undo], required: true, description: What to do.}
  owner: {type: dict, required: true, description: "change, controller, fence, reason, ticket"}
  args: {type: dict, default: {}, description: "expect: the marker that unlock was told to release"}
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
    sync_directory,
)


def things() -> list[str]:
    """Things of this host with a marker of their own: servers that this balancer's HAProxy has out of service."""
    names = os.listdir(os.path.dirname(owner_path())) if os.path.isdir(os.path.dirname(owner_path())) else []
    return sorted(n[len("owner-") : -len(".json")] for n in names if n.startswith("owner-") and n.endswith(".json"))


def unlock(module: AnsibleModule, expected: dict[str, Any]) -> bool:
    """Release exactly the marker that the operator was shown, and those that the same change set on things here."""
    markers = {thing: read_owner(thing) or {} for thing in ["", *things()]}
    ours = [thing for thing, marker in markers.items() if marker and _is(marker, expected)]
    if markers[""] and "" not in ours:
        refuse(module, "locked", markers[""])
    for thing in ours:
        os.unlink(owner_path(thing))
    sync_directory(os.path.dirname(owner_path()))
    return bool(ours)


def _is(marker: dict[str, Any], expected: dict[str, Any]) -> bool:
    return all(marker.get(key) == value for key, value in expected.items())


def main() -> None:
    module = open_module()
    if mode_of(module) == "probe":
        held = {thing: read_owner(thing) or {} for thing in things()}
        marker = read_owner() or next(iter(held.values()), {})
        finish(module, "not_done" if marker else "done", marker=marker, things=held)
    if mode_of(module) == "undo":
        finish(module, "done", released=False)
    expected = args_of(module).get("expect")
    with locked(module):
        released = unlock(module, expected) if expected else release_owner(module)
    finish(module, "done", released=released, changed=released)


if __name__ == "__main__":
    main()
