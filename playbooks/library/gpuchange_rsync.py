#!/usr/bin/python3
"""Back up directories of a host into a new set beside the earlier ones, and prove it by reading it back."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpuchange_rsync
short_description: Make and prove a backup set with rsync
description:
  - Copies args.paths into a new set below args.to. Files that did not change are hard links into the last set.
  - The work runs as a host unit; the module reports running until it has ended.
  - A set has its name only when all of it was read back and compared with its source. Earlier sets are never touched.
  - probe tells whether this change's set is there and proved.
options:
  mode: {type: str, choices: [probe, apply, undo], required: true, description: What to do.}
  owner: {type: dict, required: true, description: "change, controller, fence, reason, ticket"}
  args: {type: dict, default: {}, description: "paths, to, exclude, allow_shrink"}
  step: {type: dict, default: {}, description: "phase, provider, direction"}
author: gpuchange
"""
EXAMPLES = "- gpuchange_rsync: {mode: apply, owner: '{{ gpuchange_owner }}', args: {paths: [/srv], to: /backup}}"
RETURN = "report: {type: dict, returned: always, description: 'state, why, set'}"

from ansible.module_utils.gpuchange_backup_unit import answer  # noqa: E402


def main() -> None:
    answer("rsync")


if __name__ == "__main__":
    main()
