#!/usr/bin/python3
"""As the account that logs in: may it become root? Says which steps of the plan could not be done otherwise."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpuchange_rights
short_description: Ask sudo what the login account may do
description:
  - Runs without become. Fails when sudo says that this account may not run what Ansible's become runs (a shell as
    root), and names the steps that need it. What sudo would first ask a password for cannot be known here, and passes.
options:
  mode: {type: str, choices: [probe, apply, undo], required: true, description: What to do.}
  owner: {type: dict, required: true, description: "change, controller, fence, reason, ticket"}
  args: {type: dict, default: {}, description: "rights: {step: what it needs root for}; method: of become"}
  step: {type: dict, default: {}, description: "phase, provider, direction"}
author: gpuchange
"""
EXAMPLES = "- gpuchange_rights: {mode: probe, owner: '{{ gpuchange_owner }}', args: {rights: {stack/apt: dpkg}}}"
RETURN = "rights: {type: dict, returned: always, description: 'account, root, said'}"

import os  # noqa: E402
import pwd  # noqa: E402
from typing import Any, Dict  # noqa: E402

from ansible.module_utils.gpuchange_host import args_of, open_module, run  # noqa: E402

BECOME = ["/bin/sh", "-c", "echo BECOME-SUCCESS"]
PASSWORD = "password is required"
HEADING = "may run the following commands"


def account() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return "uid %d" % os.geteuid()


def look() -> Dict[str, str]:
    """{account, root: yes | no | asks, said}: whether sudo lets this account run a shell as root."""
    if os.geteuid() == 0:
        return {"account": account(), "root": "yes", "said": ""}
    rc, _, err = run(["sudo", "-n", "-l", *BECOME], timeout=20.0)
    if rc == 0:
        return {"account": account(), "root": "yes", "said": ""}
    if rc == 127:
        return {"account": account(), "root": "no", "said": "sudo is not installed"}
    if PASSWORD in err:
        return {"account": account(), "root": "asks", "said": err.strip()[:300]}
    _, listed, _ = run(["sudo", "-n", "-l"], timeout=20.0)
    return {"account": account(), "root": "no", "said": allowed(listed) or err.strip()[:300]}


def allowed(listed: str) -> str:
    """What `sudo -l` says that may be run, in one line."""
    _, found, tail = listed.partition(HEADING)
    lines = [line.strip() for line in tail.splitlines()[1:] if line.strip()]
    return "it may run only: %s" % "; ".join(lines)[:300] if found else ""


def lacking(found: Dict[str, str], rights: Dict[str, Any]) -> str:
    needs = "; ".join("%s (%s)" % pair for pair in rights.items())
    return "%s may not become root by sudo (%s). Root is needed for: %s. Next: gpuchange doctor --sudoers" % (
        found["account"],
        found["said"] or "sudo gives no reason",
        needs,
    )


def main() -> None:
    module = open_module()
    args = args_of(module)
    found = look()
    if found["root"] == "no" and args.get("method", "sudo") == "sudo":
        module.fail_json(msg=lacking(found, dict(args.get("rights") or {})), rights=found)
    module.exit_json(changed=False, rights=found)


if __name__ == "__main__":
    main()
