#!/usr/bin/python3
"""Keeps the exact RPMs to go forward and to come back, so that neither needs a network; proves it by simulation."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpuchange_rpms
short_description: Collect the RPMs of a stack change in the change's store on the host
description:
  - Fetches every package of the transaction and the installed version of each, as a host unit, while the host serves.
  - Reads every file back, checks signatures as dnf's configuration wants it, simulates the change from the store alone.
options:
  mode: {type: str, choices: [probe, apply, undo], required: true, description: What to do.}
  owner: {type: dict, required: true, description: "change, controller, fence, reason, ticket"}
  args: {type: dict, default: {}, description: "transaction: {install: {name: version}, remove: [name]}"}
  step: {type: dict, default: {}, description: "phase, provider, direction"}
author: gpuchange
"""
EXAMPLES = (
    "- gpuchange_rpms: {mode: apply, owner: '{{ gpuchange_owner }}', args: {transaction: {install: {}, remove: []}}}"
)
RETURN = "report: {type: dict, returned: always, description: 'state, kept, bytes, not_obtainable, problems, store'}"

import os  # noqa: E402
import sys  # noqa: E402
from typing import Any, NoReturn  # noqa: E402

from ansible.module_utils import gpuchange_dnf_unit, gpuchange_rpm_keep  # noqa: E402
from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible.module_utils.gpuchange_dnf_call import ask, interpreter  # noqa: E402
from ansible.module_utils.gpuchange_dnf_plan import cached_rpms  # noqa: E402
from ansible.module_utils.gpuchange_dnf_walk import stored  # noqa: E402
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
from ansible.module_utils.gpuchange_rpm import installed  # noqa: E402
from ansible.module_utils.gpuchange_unit import (  # noqa: E402
    forget_unit,
    host_unit,
    install_script,
    unit_name,
    unit_state,
)


def old_versions(transaction: dict[str, Any]) -> dict[str, str]:
    """{name: version} that a rollback would need: what the transaction replaces or removes, as installed now."""
    rows = installed()
    touched = sorted(set(transaction["install"]) | set(transaction["remove"]))
    return {
        name: rows[name]["version"]
        for name in touched
        if name in rows and rows[name]["version"] != transaction["install"].get(name)
    }


def collect(module: AnsibleModule, wanted: list[list[str]]) -> dict[str, Any]:
    store = state_path(module, "rpms")
    os.makedirs(store, mode=0o700, exist_ok=True)
    name = unit_name(module, "fetch")
    if unit_state(name)["state"] == "lost":
        forget_unit(name)
    job = name.file("job")
    cached = {"%s=%s" % pair: path for pair, path in cached_rpms().items()}
    fetch = {"do": "fetch", "store": store, "cache": store + "-cache", "answer": store + "-fetched.json"}
    script = install_script(module, gpuchange_dnf_unit)
    write_atomic(
        job,
        {"store": store, "wanted": wanted, "cached": cached, "python": interpreter(), "script": script, "fetch": fetch},
    )
    argv = [sys.executable, "-I", install_script(module, gpuchange_rpm_keep), job]
    return host_unit(module, "fetch", argv, wait_s=35.0, deadline_s=7200.0)


def apply(module: AnsibleModule, transaction: dict[str, Any]) -> NoReturn:
    old = old_versions(transaction)
    pairs = set(transaction["install"].items()) | set(old.items())
    with owned(module):
        done = collect(module, [list(pair) for pair in sorted(pairs)])
        if done["state"] == "running":
            finish(module, "running", why="packages are being fetched (%s)" % done["unit"])
        if done["state"] == "lost" or done["rc"]:
            forget_unit(unit_name(module, "fetch"))
            finish(module, "not_done", why="fetching packages failed: %s" % done.get("out", "interrupted")[-500:])
        problems, missing = prove(module, transaction, old)
        if problems:
            forget_unit(unit_name(module, "fetch"))
    manifest = read_json(os.path.join(state_path(module, "rpms"), "manifest.json"), {}) or {}
    files = manifest.get("files", {})
    finish(
        module,
        "not_done" if problems else "done",
        why="; ".join(problems),
        changed=True,
        store=state_path(module, "rpms"),
        kept=len(files),
        bytes=sum(entry["size"] for entry in files.values()),
        not_obtainable=missing,
        problems=problems,
    )


def prove(module: AnsibleModule, transaction: dict[str, Any], old: dict[str, str]) -> tuple[list[str], list[str]]:
    """(problems, old packages that could not be had): every new file there, signed as wanted, of use to dnf."""
    manifest = read_json(os.path.join(state_path(module, "rpms"), "manifest.json"), {}) or {}
    paths, lacking = stored(module, transaction["install"])
    _, missing = stored(module, old)
    problems = ["not signed as dnf's configuration wants it: %s" % row for row in manifest.get("unsigned", [])]
    if lacking:
        return [*problems, "not obtainable: %s" % ", ".join(lacking)], missing
    job = {"do": "simulate", "install": transaction["install"], "remove": transaction["remove"], "files": paths}
    why = ask(job).get("error", "")
    return problems + (["installing from the package store alone fails: %s" % why] if why else []), missing


def main() -> None:
    module = open_module()
    if mode_of(module) == "probe":
        state = unit_state(unit_name(module, "fetch"))["state"]
        finish(module, "running" if state == "running" else "not_done", why="the package store is looked at again")
    if mode_of(module) == "undo":
        finish(module, "done", why="kept packages stay until they are pruned")
    transaction = args_of(module).get("transaction")
    if not transaction:
        finish(module, "unknown", why="preflight/dnf has not said which packages to keep")
    apply(module, transaction)


if __name__ == "__main__":
    main()
