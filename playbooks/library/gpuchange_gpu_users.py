#!/usr/bin/python3
"""Wait for, refuse or stop what uses the GPUs of a drained host, and start again what was stopped."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpuchange_gpu_users
short_description: No process uses a GPU any more
description:
  - Users are found by open handles and mappings of C(/dev/nvidia*), which works also when NVML does not.
  - Driver daemons (C(daemons)) are no users; the driver's packages stop and start them.
  - apply waits (C(wait)), fails at once (C(refuse)), or stops the listed services (C(stop)).
  - It never ends a process itself.
  - undo starts exactly those services that were active when apply stopped them, and waits until they are active.
options:
  mode: {type: str, choices: [probe, apply, undo], required: true, description: What to do.}
  owner: {type: dict, required: true, description: "change, controller, fence, reason, ticket"}
  args:
    type: dict
    default: {}
    description: "policy, services, timeout, start_within, daemons (unit names), wait_s"
  step: {type: dict, default: {}, description: "phase, provider, direction"}
author: gpuchange
"""
EXAMPLES = "- gpuchange_gpu_users: {mode: apply, owner: '{{ gpuchange_owner }}', args: {policy: wait, timeout: 300}}"
RETURN = "report: {type: dict, returned: always, description: 'state, users, services, found, started, waited_s'}"

import time  # noqa: E402
from typing import Any, Callable, Dict, List, NoReturn  # noqa: E402

from ansible.module_utils import gpuchange_services as services  # noqa: E402
from ansible.module_utils import gpuchange_upgrades as upgrades  # noqa: E402
from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible.module_utils.gpuchange_gpu_users import scan  # noqa: E402
from ansible.module_utils.gpuchange_host import (  # noqa: E402
    args_of,
    direction_of,
    finish,
    mode_of,
    open_module,
    owned,
    state_path,
)
from ansible.module_utils.gpuchange_notes import Notes  # noqa: E402

POLL_S = 0.3
USERS_SHOWN = 20
DEFAULTS = {"policy": "wait", "services": [], "timeout": 300, "start_within": 300, "daemons": [], "wait_s": 40.0}


class Job:
    """One call on one host. `notes`: found (services before the first stop), clocks, released."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module, self.args = module, dict(DEFAULTS, **args_of(module))
        self.notes = Notes(state_path(module, "gpu_users.json"))
        self.units = list(self.args["services"]) if self.args["policy"] == "stop" else []
        self.deadline = time.monotonic() + float(self.args["wait_s"])
        self.changed = False

    @property
    def stopped(self) -> List[str]:
        """Services that were running when found: those, and only those, are ours to start."""
        found = self.notes.data.get("found") or {}
        return sorted(unit for unit, state in found.items() if services.is_running(state))

    def users(self) -> List[Dict[str, Any]]:
        return [row for row in scan() if row["unit"] not in self.args["daemons"]]

    def wait(self, holds: Callable[[], bool], limit_s: float) -> bool:
        deadline = min(self.deadline, time.monotonic() + limit_s)
        while not holds():
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        return True

    def finish(self, state: str, why: str = "", **fields: Any) -> NoReturn:
        users = self.users()
        fields.update(users=users[:USERS_SHOWN], count=len(users), services=services.states(self.units))
        finish(self.module, state, why=why, changed=self.changed, found=self.notes.data.get("found") or {}, **fields)


def named(users: List[Dict[str, Any]]) -> str:
    """`pid 4711 python3 (vllm.service)`, for the first few."""
    shown = ["pid %d %s (%s)" % (row["pid"], row["comm"] or "?", row["unit"] or "no unit") for row in users[:5]]
    return ", ".join(shown) + (" and %d more" % (len(users) - 5) if len(users) > 5 else "")


# -------------------------------------------------------------------------------------------------- apply


def apply(job: Job) -> NoReturn:
    refuse_unknown(job)
    with owned(job.module, wait_s=10.0):
        stop(job)
    timeout, waited = float(job.args["timeout"]), job.notes.clock("apply")
    if job.units and not job.wait(lambda: all_down(job), timeout - waited):
        unfinished(job, "still stopping: %s" % ", ".join(up(job)))
    patient = job.args["policy"] == "wait"
    if job.wait(lambda: not job.users(), timeout - waited if patient else 2.0 if job.units else 0.0):
        still(job, timeout)
        job.finish("done", waited_s=round(job.notes.clock("apply"), 1))
    users = named(job.users())
    if patient:
        unfinished(job, "GPU in use: %s" % users)
    rest = " after the listed services were stopped" if job.units else ""
    job.finish("not_done", "GPU in use%s: %s" % (rest, users))


def still(job: Job, timeout: float) -> None:
    """From here on nobody else changes the host's packages: what is sealed next must still hold when it is changed."""
    with owned(job.module, wait_s=10.0):
        job.changed = upgrades.block() or job.changed
    if not job.wait(lambda: not upgrades.running(), timeout - job.notes.clock("apply")):
        unfinished(job, "an automatic upgrade is at work (%s)" % ", ".join(upgrades.running()))


def refuse_unknown(job: Job) -> None:
    """A service that is not there cannot be stopped: most likely its name is wrong."""
    unknown = services.missing(services.states(job.units))
    if unknown and not job.notes.data.get("found"):
        job.finish("not_done", "gpu_users.services: no such unit on this host: %s" % ", ".join(unknown))


def stop(job: Job) -> None:
    """Save what runs, then ask systemd to stop it. A later call keeps the first one's record and stops the rest."""
    found = services.states(job.units)
    if not job.notes.ours:
        job.notes.begin(found={})
    job.notes.save(found=dict(found, **job.notes.data["found"]))  # what was recorded first, stands
    job.notes.forget_clock("undo")
    running = [unit for unit, state in found.items() if services.is_running(state)]
    if not running:
        return
    refused = services.order("stop", running)
    if refused:
        raise RuntimeError("cannot stop %s: %s" % (", ".join(running), refused))
    job.changed = True


def up(job: Job) -> List[str]:
    return [unit for unit, state in services.states(job.units).items() if state["active"] not in ("inactive", "failed")]


def all_down(job: Job) -> bool:
    return not up(job)


def unfinished(job: Job, why: str) -> NoReturn:
    timeout, waited = float(job.args["timeout"]), job.notes.clock("apply")
    state = "running" if waited < timeout else "not_done"
    job.finish(state, "%s; %d of %d s waited" % (why, waited, timeout), waited_s=round(waited, 1))


# --------------------------------------------------------------------------------------------------- undo


def undo(job: Job) -> NoReturn:
    if not job.notes.ours or not job.stopped:
        release(job)
    with owned(job.module, wait_s=10.0):
        upgrades.give_back()
        start(job)
    within, waited = float(job.args["start_within"]), job.notes.clock("undo")
    if job.wait(lambda: not inactive(job), within - waited):
        release(job)
    waited = job.notes.clock("undo")
    lacking = inactive(job)
    failed = any(state["active"] == "failed" for state in services.states(job.stopped).values())
    state = "running" if waited < within and not failed else "not_done"
    job.finish(state, "%s; %d of %d s waited" % ("; ".join(lacking), waited, within), started=job.stopped)


def start(job: Job) -> None:
    """Ask systemd for those that were running. After a reboot an enabled one runs already: that is as good."""
    now = services.states(job.stopped)
    down = [unit for unit, state in now.items() if not services.is_running(state)]
    if not down:
        return
    refused = services.order("start", down)
    if refused:
        raise RuntimeError("cannot start %s: %s" % (", ".join(down), refused))
    job.changed = True


def inactive(job: Job) -> List[str]:
    """What is not active that should be, with its own last words if it failed."""
    return [
        "%s is %s (%s)" % (unit, state["active"], services.last_words(unit) or state["sub"])
        for unit, state in services.states(job.stopped).items()
        if state["active"] != "active"
    ]


def release(job: Job) -> NoReturn:
    started = job.stopped
    if job.notes.ours:
        with owned(job.module, wait_s=10.0):
            upgrades.give_back()
            job.notes.save(released=True)
    job.finish("done", started=started)


# -------------------------------------------------------------------------------------------------- probe


def probe(job: Job) -> NoReturn:
    if direction_of(job.module) == "undo":
        lacking = inactive(job) if job.notes.ours else []
        done = not job.notes.ours
        job.finish("done" if done else "not_done", "; ".join(lacking) or ("" if done else "not released yet"))
    users, running = job.users(), up(job)
    done = job.notes.ours and not users and not running and upgrades.blocked()
    why = "GPU in use: %s" % named(users) if users else "running: %s" % ", ".join(running) if running else ""
    unknown = services.missing(services.states(job.units))
    job.finish("done" if done else "not_done", "" if done else why or "not looked after yet", unknown=unknown)


def main() -> None:
    module = open_module()
    try:
        {"probe": probe, "apply": apply, "undo": undo}[mode_of(module)](Job(module))
    except (RuntimeError, ValueError) as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
