#!/usr/bin/python3
"""Keeps the exact packages to go forward and to come back, so that neither needs a network; proves it by simulation."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpuchange_debs
short_description: Collect the packages of a stack change in the change's store on the host
description:
  - Fetches every package of the transaction and the installed version of each, as a host unit, while the host serves.
  - Proves the store by reading every file back and by simulating both ways offline.
options:
  mode: {type: str, choices: [probe, apply, undo], required: true, description: What to do.}
  owner: {type: dict, required: true, description: "change, controller, fence, reason, ticket"}
  args: {type: dict, default: {}, description: "transaction: {install: {name: version}, remove: [name]}"}
  step: {type: dict, default: {}, description: "phase, provider, direction"}
author: gpuchange
"""
EXAMPLES = (
    "- gpuchange_debs: {mode: apply, owner: '{{ gpuchange_owner }}', args: {transaction: {install: {}, remove: []}}}"
)
RETURN = "report: {type: dict, returned: always, description: 'state, kept, bytes, not_obtainable, problems, store'}"

import os  # noqa: E402
import sys  # noqa: E402
from typing import Any, NoReturn  # noqa: E402

from ansible.module_utils import gpuchange_debs_unit  # noqa: E402
from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible.module_utils.gpuchange_apt_private import PrivateApt  # noqa: E402
from ansible.module_utils.gpuchange_host import (  # noqa: E402
    args_of,
    finish,
    mode_of,
    open_module,
    owned,
    state_dir,
    state_path,
    write_atomic,
)
from ansible.module_utils.gpuchange_packages import installed, native_architecture  # noqa: E402
from ansible.module_utils.gpuchange_store import Store  # noqa: E402
from ansible.module_utils.gpuchange_unit import forget_unit, host_unit, install_script, unit_name, unit_state  # noqa: E402


def old_versions(transaction: dict[str, Any]) -> dict[str, str]:
    """{name: version} that a rollback would need: what the transaction replaces or removes, as installed now."""
    rows = installed()
    touched = set(transaction["install"]) | set(transaction["remove"])
    return {
        name: rows[name]["version"]
        for name in sorted(touched)
        if name in rows and rows[name]["version"] != transaction["install"].get(name)
    }


def collect(module: AnsibleModule, store: Store, wanted: list[list[str]]) -> dict[str, Any]:
    os.makedirs(os.path.join(state_dir(module), "debs"), mode=0o755, exist_ok=True)
    apt = PrivateApt(state_path(module, "apt-fetch"))
    name = unit_name(module, "fetch")
    if unit_state(name)["state"] == "lost":
        forget_unit(name)
    job = name.file("job")
    write_atomic(job, {"store": store.folder, "wanted": wanted, "native": native_architecture(), "env": apt.env})
    argv = [sys.executable, "-I", install_script(module, gpuchange_debs_unit), job]
    done = host_unit(module, "fetch", argv, wait_s=35.0, deadline_s=7200.0)
    if done["state"] == "finished":
        apt.close()
    return done


def apply(module: AnsibleModule, transaction: dict[str, Any]) -> NoReturn:
    store = Store(module)
    old = old_versions(transaction)
    wanted = [[name, version] for name, version in sorted(transaction["install"].items())]
    wanted += [[name, version] for name, version in sorted(old.items())]
    with owned(module):
        done = collect(module, store, wanted)
        if done["state"] == "running":
            finish(module, "running", why="packages are being fetched (%s)" % done["unit"])
        if done["state"] == "lost":
            finish(module, "not_done", why="fetching packages was interrupted (%s)" % done["unit"])
        if done["rc"]:
            finish(module, "not_done", why="fetching packages failed: %s" % done["out"].strip()[-500:])
        proof = store.prove(transaction["install"], transaction["remove"], old)
        if proof["problems"]:
            forget_unit(unit_name(module, "fetch"))
    report(module, store, proof, old)


def report(module: AnsibleModule, store: Store, proof: dict[str, Any], old: dict[str, str]) -> NoReturn:
    files = store.manifest().get("files", {})
    missing = proof["not_obtainable"]
    finish(
        module,
        "not_done" if proof["problems"] else "done",
        why="; ".join(proof["problems"]),
        changed=True,
        store=store.folder,
        kept=len(files),
        bytes=sum(entry["size"] for entry in files.values()),
        old=old,
        sources=sorted({entry["source"] for entry in files.values()}),
        not_obtainable=missing,
        irreversible="cannot guarantee rollback for %s" % ", ".join(missing) if missing else "",
        problems=proof["problems"],
    )


def probe(module: AnsibleModule) -> NoReturn:
    """Done only if the store was collected; a collection that ended is proven again by apply, which costs little."""
    state = unit_state(unit_name(module, "fetch"))["state"]
    finish(module, "running" if state == "running" else "not_done", why="the package store is looked at again")


def main() -> None:
    module = open_module()
    if mode_of(module) == "probe":
        probe(module)
    if mode_of(module) == "undo":
        finish(module, "done", why="kept packages stay until they are pruned")
    transaction = args_of(module).get("transaction")
    if not transaction:
        finish(module, "unknown", why="preflight/apt has not said which packages to keep")
    apply(module, transaction)


if __name__ == "__main__":
    main()
