#!/usr/bin/python3
"""Look at a host that is back in service; the time it has been watched is kept on the host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpuchange_watch
short_description: One look of a soak
description:
  - Returns what nvidia-smi, the kernel log and systemd say now, beside what they said at the first look.
  - The state is C(running) until the host has been watched for C(for_s) seconds. Time between two looks counts up to a
    limit only, so that hours in which nobody looked are not taken for a soak.
options:
  mode: {type: str, choices: [probe, apply, undo], required: true, description: What to do.}
  owner: {type: dict, required: true, description: "change, controller, fence, reason, ticket"}
  args:
    type: dict
    default: {}
    description: "for_s, query (nvidia-smi fields), services, since (epoch; 0: first look), fresh (begin anew)"
  step: {type: dict, default: {}, description: "phase, provider, direction"}
author: gpuchange
"""
EXAMPLES = "- gpuchange_watch: {mode: apply, owner: '{{ gpuchange_owner }}', args: {for_s: 30, query: [uuid]}}"
RETURN = "report: {type: dict, returned: always, description: 'state, elapsed_s, now, first'}"

import time  # noqa: E402
from typing import Any, Dict  # noqa: E402

from ansible.module_utils import gpuchange_kernel_log as kernel_log  # noqa: E402
from ansible.module_utils import gpuchange_services as services  # noqa: E402
from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible.module_utils.gpuchange_host import (  # noqa: E402
    args_of,
    boot_id,
    finish,
    mode_of,
    open_module,
    owned,
    read_text,
    state_path,
)
from ansible.module_utils.gpuchange_look import run  # noqa: E402
from ansible.module_utils.gpuchange_notes import Notes  # noqa: E402

GAP_S = 60.0


def uptime() -> float:
    return float((read_text("/proc/uptime") or "0").split()[0])


def look(args: Dict[str, Any], since: float) -> Dict[str, Any]:
    query = ["--query-gpu=" + ",".join(args["query"]), "--format=csv,noheader,nounits"]
    said = run(["nvidia-smi", *query], 20.0)
    return {
        "boot_id": boot_id(),
        "smi": {key: said[key] for key in ("rc", "out", "err", "hung")},
        "log": kernel_log.since(since),
        "services": services.states(list(args["services"])),
    }


def watch(module: AnsibleModule, args: Dict[str, Any], notes: Notes) -> None:
    with owned(module, 10.0):
        if args["fresh"] or not notes.data:
            begin = float(args["since"]) or time.time()
            notes.begin(since=begin, first=look(args, begin), elapsed=0.0, at=uptime(), boot_id=boot_id())
        gap = uptime() - float(notes.data["at"]) if notes.data["boot_id"] == boot_id() else 0.0
        elapsed = float(notes.data["elapsed"]) + min(max(0.0, gap), GAP_S)
        now = look(args, float(notes.data["since"]))
        finished = elapsed >= float(args["for_s"])
        notes.save(elapsed=elapsed, at=uptime(), boot_id=boot_id(), released=finished)
    left = float(args["for_s"]) - elapsed
    why = "" if finished else "watched for %d of %d s" % (elapsed, float(args["for_s"]))
    state = "done" if finished else "running"
    finish(
        module, state, why=why, elapsed_s=round(elapsed, 1), left_s=round(left, 1), now=now, first=notes.data["first"]
    )


def main() -> None:
    module = open_module()
    args = dict({"for_s": 30, "query": ["uuid"], "services": [], "since": 0, "fresh": False}, **args_of(module))
    try:
        notes = Notes(state_path(module, "watch.json"))
        if mode_of(module) == "apply":
            watch(module, args, notes)
        if mode_of(module) == "undo":
            finish(module, "done")
        # a watch is judged by its looks, and the last one's answer may be lost: look again instead of adopting
        now = look(args, float(notes.data.get("since") or time.time()))
        finish(module, "not_done", why="a watch ends with a look", now=now, first=notes.data.get("first") or now)
    except (RuntimeError, ValueError) as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
