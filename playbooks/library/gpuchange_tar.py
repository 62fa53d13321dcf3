#!/usr/bin/python3
"""Back up directories of a host into one tar archive, and prove it by reading it back and restoring a sample."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpuchange_tar
short_description: Make and prove a backup set with GNU tar
description:
  - Archives args.paths into one file of a new set below args.to, plain or compressed.
  - The work runs as a host unit; the module reports running until it has ended.
  - A set has its name only when all of its archive was read back and compared with its source. Earlier sets stay.
  - A set that is there already is read once more; one that was damaged since is made anew.
  - probe tells whether this change's set is there and was not written to since it was proved.
options:
  mode: {type: str, choices: [probe, apply, undo], required: true, description: What to do.}
  owner: {type: dict, required: true, description: "change, controller, fence, reason, ticket"}
  args: {type: dict, default: {}, description: "paths, to, exclude, allow_shrink, compression, may_change"}
  step: {type: dict, default: {}, description: "phase, provider, direction"}
author: gpuchange
"""
EXAMPLES = "- gpuchange_tar: {mode: apply, owner: '{{ gpuchange_owner }}', args: {paths: [/srv], to: /backup}}"
RETURN = "report: {type: dict, returned: always, description: 'state, why, set'}"

from ansible.module_utils.gpuchange_backup_unit import answer  # noqa: E402


def main() -> None:
    answer("tar")


if __name__ == "__main__":
    main()
