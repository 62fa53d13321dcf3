#!/usr/bin/python3
"""Run the plan's hook commands, one after another, each once; on the host or on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpuchange_hook
short_description: Run hook commands before drain or after release
description:
  - Commands are lists of words; no shell. They run in a clean environment with GPUCHANGE_CHANGE, GPUCHANGE_HOST,
    GPUCHANGE_PHASE, GPUCHANGE_REASON and GPUCHANGE_TICKET set.
  - A command runs detached from this call, within its own deadline; a later call attaches to it. One that ended with 0
    is not run again in this direction; one that failed or was lost in a crash is.
options:
  mode: {type: str, choices: [probe, apply, undo], required: true, description: What to do.}
  owner: {type: dict, required: true, description: "change, controller, fence, reason, ticket"}
  args:
    type: dict
    default: {}
    description: >-
      groups: [{on: host | controller, hooks: [{command, timeout}]}]; group: which of them this call runs; before: the
      state of the group before it (anything but done: this one waits); host: inventory name; wait_s
  step: {type: dict, default: {}, description: "phase, provider, direction"}
author: gpuchange
"""
EXAMPLES = "- gpuchange_hook: {mode: apply, owner: '{{ gpuchange_owner }}', args: {groups: [], group: 0}}"
RETURN = "report: {type: dict, returned: always, description: 'state, why, hooks'}"

import os  # noqa: E402
import pwd  # noqa: E402
import time  # noqa: E402
import zlib  # noqa: E402
from typing import Any, ContextManager, Dict, List, NoReturn  # noqa: E402

from ansible.module_utils import gpuchange_host, gpuchange_unit  # noqa: E402
from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible.module_utils.gpuchange_host import (  # noqa: E402
    args_of,
    direction_of,
    finish,
    locked,
    mode_of,
    open_module,
    owned,
    phase_of,
    state_path,
)
from ansible.module_utils.gpuchange_notes import Notes  # noqa: E402

LOST_LIMIT = 3
TAIL = 800


class Job:
    """One group of commands. `notes`: {generation, running: {key: generation}, ended: {key: {rc, out}}, direction}."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module, self.args = module, dict({"group": 0, "before": "done", "wait_s": 40.0}, **args_of(module))
        self.group = self.args["groups"][int(self.args["group"])]
        self.host = str(self.args.get("host", ""))
        if self.local:
            use_own_folder(self.host)
        self.notes = Notes(state_path(module, "hooks.json"))
        self.deadline = time.monotonic() + float(self.args["wait_s"]) / max(1, len(self.args["groups"]))
        self.changed = False

    @property
    def local(self) -> bool:
        return bool(self.group["on"] == "controller")

    @property
    def hooks(self) -> List[Dict[str, Any]]:
        return list(self.group["hooks"])

    def key(self, index: int) -> str:
        """A unit's step name: which command, of which host (hosts share the controller)."""
        return "hook_%s_%d_%08x" % (self.args["group"], index, zlib.crc32(self.host.encode("utf-8")))

    def holding(self) -> ContextManager[Any]:
        """The host's marker; on the controller, where others' markers have no say, only the lock."""
        return locked(self.module, 10.0) if self.local else owned(self.module, 10.0)

    def ended(self, index: int) -> Dict[str, Any]:
        done: Dict[str, Any] = self.notes.data.get("ended") or {}
        return done.get(self.key(index)) or {}

    def environment(self) -> Dict[str, str]:
        owner = self.module.params["owner"]
        own = {"HOST": self.host, "CHANGE": owner["change"], "PHASE": phase_of(self.module)}
        own.update({key.upper(): owner.get(key) for key in ("reason", "ticket")})
        found = {"GPUCHANGE_" + key: str(value or "") for key, value in own.items()}
        if self.local:
            found.update(HOME=home(), PATH=os.environ.get("PATH") or gpuchange_host.CLEAN_ENV["PATH"])
        return found

    def finish(self, state: str, why: str = "") -> NoReturn:
        results = [dict(self.ended(index), command=hook["command"]) for index, hook in enumerate(self.hooks)]
        finish(self.module, state, why=why, changed=self.changed, hooks=results, on=self.group["on"])


def home() -> str:
    return pwd.getpwuid(os.getuid()).pw_dir


def use_own_folder(host: str) -> None:
    """On the controller nothing but the operator's own directory may be written; one folder for each host."""
    root = os.path.join(home(), ".local", "state", "gpuchange", "hooks", "%08x" % zlib.crc32(host.encode("utf-8")))
    gpuchange_host.ROOT = gpuchange_unit.ROOT = root


def begin(job: Job) -> None:
    """Results count for one direction of one phase: released and drained anew, the commands run anew."""
    turn = "%s-%s" % (phase_of(job.module), direction_of(job.module))
    if job.notes.data.get("turn") != turn:
        kept = int(job.notes.data.get("generation") or 0)
        job.notes.begin(turn=turn, generation=kept, running={}, ended={})


def act(job: Job) -> NoReturn:
    if job.args["before"] != "done":
        job.finish(str(job.args["before"]), "")
    if not job.hooks:
        job.finish("done")
    with job.holding():
        begin(job)
        for index, hook in enumerate(job.hooks):
            if not job.ended(index):
                run(job, index, hook)
    job.finish("done")


def run(job: Job, index: int, hook: Dict[str, Any]) -> None:
    """Run one command or attach to it; returns only once it has ended well."""
    for _ in range(LOST_LIMIT):
        found = attach(job, index, hook)
        if found["state"] != "lost":
            break
        settle(job, index)
    said = "hook %s" % " ".join(hook["command"])
    if found["state"] == "running":
        job.finish("running", "%s is still running" % said)
    if found["state"] == "lost":
        settle(job, index)
        job.finish("not_done", "%s ended without a result, %d times" % (said, LOST_LIMIT))
    rc, out = found.get("rc"), str(found.get("out", ""))[-TAIL:].strip()
    if rc != 0:
        settle(job, index)
        end = "did not end within %s s" % hook["timeout"] if found.get("timed_out") else "ended with %s" % rc
        job.finish("not_done", "%s %s%s" % (said, end, ": " + out if out else ""))
    settle(job, index, {"rc": rc, "out": out})


def attach(job: Job, index: int, hook: Dict[str, Any]) -> Dict[str, Any]:
    key, running = job.key(index), dict(job.notes.data.get("running") or {})
    if key not in running:
        running[key] = int(job.notes.data["generation"]) + 1
        job.notes.save(running=running, generation=running[key])
        job.changed = True
    left = max(0.0, job.deadline - time.monotonic())
    argv, limit = list(hook["command"]), float(hook["timeout"])
    return gpuchange_unit.host_unit(
        job.module, key, argv, wait_s=left, deadline_s=limit, env=job.environment(), generation=running[key]
    )


def settle(job: Job, index: int, ended: Any = None) -> None:
    """The command is no longer under way; with a result, it is not run again in this direction."""
    running = {key: value for key, value in job.notes.data["running"].items() if key != job.key(index)}
    done = dict(job.notes.data["ended"], **({job.key(index): ended} if ended else {}))
    job.notes.save(running=running, ended=done)


def probe(job: Job) -> NoReturn:
    turn = "%s-%s" % (phase_of(job.module), direction_of(job.module))
    current = job.notes.data.get("turn") == turn
    left = [" ".join(hook["command"]) for i, hook in enumerate(job.hooks) if not (current and job.ended(i))]
    job.finish("not_done" if left else "done", "not yet run: %s" % "; ".join(left) if left else "")


def main() -> None:
    module = open_module()
    try:
        job = Job(module)
        probe(job) if mode_of(module) == "probe" else act(job)
    except (ValueError, OSError) as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
