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


def unlock(module: AnsibleModule, expected: dict[str, Any]) -> bool:
    """Release exactly the marker that the operator was shown."""
    marker = read_owner()
    if marker is None:
        return False
    if any(marker.get(key) != value for key, value in expected.items()):
        refuse(module, "locked", marker)
    os.unlink(owner_path())
    sync_directory(os.path.dirname(owner_path()))
    return True


def main() -> None:
    module = open_module()
    if mode_of(module) == "probe":
        marker = read_owner()
        finish(module, "not_done" if marker else "done", marker=marker or {})
    if mode_of(module) == "undo":
        finish(module, "done", released=False)
    expected = args_of(module).get("expect")
    with locked(module):
        released = unlock(module, expected) if expected else release_owner(module)
    finish(module, "done", released=released, changed=released)


if __name__ == "__main__":
    main()
