#!/usr/bin/python3
"""Take a server out of HAProxy without losing a request, and put it back as it was found. Runs on the balancer."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpuchange_haproxy
short_description: Drain or release one server of an HAProxy
description:
  - apply sets the server to drain once enough others serve, and waits for its sessions, those of old workers included.
  - undo waits, while the server still gets no traffic, until a health check passes that began after undo; then restores
    the administrative state and the weight that apply found. A server that somebody else took out stays out.
  - The server is left in C(drain), not C(maint), so that HAProxy keeps checking it. Leaving maintenance, HAProxy takes
    a server for up until its first check fails, and sends requests to it meanwhile. Only a server that persistent
    clients can still reach in C(drain) (cookie, stick table) is put into C(maint) after its last session.
options:
  mode: {type: str, choices: [probe, apply, undo], required: true, description: What to do.}
  owner: {type: dict, required: true, description: "change, controller, fence, reason, ticket"}
  args:
    type: dict
    default: {}
    description: >-
      server, backends (empty: all that have it), socket, timeout, on_timeout (fail or cut), min_serving, ready_within,
      wait_s (longest wait of this call), among (balancers that share that wait), balancer (name for people)
  step: {type: dict, default: {}, description: "phase, provider, direction"}
author: gpuchange
"""
EXAMPLES = "- gpuchange_haproxy: {mode: apply, owner: '{{ gpuchange_owner }}', args: {server: h1, backends: [gpu]}}"
RETURN = "report: {type: dict, returned: always, description: 'state, servers, members, sessions, found, waited_s'}"

import time  # noqa: E402
from typing import Any, Callable, Dict, NoReturn  # noqa: E402

from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible.module_utils.gpuchange_haproxy_api import Haproxy, HaproxyError, reaches, serves  # noqa: E402
from ansible.module_utils.gpuchange_haproxy_job import Look, ServerNotes, checked_args  # noqa: E402
from ansible.module_utils.gpuchange_host import (  # noqa: E402
    args_of,
    direction_of,
    finish,
    locked,
    mode_of,
    open_module,
    owned,
    read_owner,
    refuse,
    release_owner,
    shut_out,
    state_path,
)

POLL_S = 0.2
CUT_S = 5.0


class Job:
    """One call for one server of one HAProxy."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module, self.args = module, checked_args(args_of(module))
        self.server: str = self.args["server"]
        self.haproxy = Haproxy(self.args["socket"])
        self.notes = ServerNotes(state_path(module, "haproxy-%s.json" % self.server))
        self.changed = False
        self.begun = time.monotonic()

    def look(self) -> Look:
        return Look(self.haproxy, list(self.args.get("backends") or []), self.server)

    def owned(self) -> Any:
        return owned(self.module, wait_s=10.0, thing=self.server)

    def wait(self, until: Callable[[Look], bool], limit_s: float) -> Look:
        """Look again and again until `until` holds, at most `limit_s` seconds and this call's share of the wait."""
        share = float(self.args["wait_s"]) / max(1, int(self.args["among"]))
        deadline = min(time.monotonic() + limit_s, self.begun + share)
        look = self.look()
        while not until(look) and time.monotonic() < deadline:
            time.sleep(POLL_S)
            look = self.look()
        return look

    def set_admin(self, backend: str, word: str) -> None:
        self.notes.set_left(backend, word)
        self.haproxy.set_admin(backend, self.server, word)
        self.changed = True

    def finish(self, state: str, look: Look, why: str = "", **fields: Any) -> NoReturn:
        found = {backend: kept["found"] for backend, kept in (self.notes.data.get("servers") or {}).items()}
        fields.update(look.report(), found=found, balancer=self.args["balancer"], server=self.server)
        finish(self.module, state, why=why and self.at(why), changed=self.changed, **fields)
        raise SystemExit(0)

    def at(self, text: str) -> str:
        """`text` with the balancer that it speaks of."""
        return "%s: %s" % (self.args["balancer"], text) if self.args["balancer"] else text


# -------------------------------------------------------------------------------------------------- apply


def apply(job: Job) -> NoReturn:
    short = take_out(job)
    while short and time.monotonic() - job.begun < share_of(job):
        time.sleep(1.0)
        short = take_out(job)
    if short:
        job.finish("not_done", job.look(), "%s was not taken out: %s" % (job.server, short))
    timeout = float(job.args["timeout"])
    waited = job.notes.clock("drain")
    look = job.wait(lambda now: now.idle, max(0.0, timeout - waited))
    waited = job.notes.clock("drain")
    if look.idle:
        settled(job, look, waited)
    if waited < timeout:
        why = "%s sessions left (%s), %d of %d s waited" % (job.server, look.left(), waited, timeout)
        job.finish("running", look, why, waited_s=round(waited, 1))
    timed_out(job, look, waited)


def share_of(job: Job) -> float:
    return float(job.args["wait_s"]) / max(1, int(job.args["among"]))


def take_out(job: Job) -> str:
    """Set the server to drain wherever it is ready; "" once that is so, else why it may not leave yet.

    Counting and acting under one lock: two hosts that leave at the same moment must not count on each other.
    """
    with job.owned():
        look = job.look()
        short = look.short_of(int(job.args["min_serving"]))
        if short:
            return short
        if not job.notes.ours:
            job.notes.begin_with(look)
        job.notes.forget_clock("release")
        job.notes.save(rechecked=False)
        for row in look.mine:
            if row["admin"] == "ready":
                job.set_admin(row["backend"], "drain")
        expect_out(job.look())
    return ""


def expect_out(look: Look) -> None:
    still = [row["backend"] for row in look.mine if row["admin"] == "ready"]
    if still:
        raise HaproxyError("HAProxy accepted the drain, but the server is still ready in %s" % ", ".join(still))


def settled(job: Job, look: Look, waited: float, **fields: Any) -> NoReturn:
    """No session is left: close the door to persistent clients too, where there are any."""
    with job.owned():
        for row in look.mine:
            if row["persistent"] and row["admin"] == "drain":
                job.set_admin(row["backend"], "maint")
    job.finish("done", job.look(), waited_s=round(waited, 1), **fields)


def timed_out(job: Job, look: Look, waited: float) -> NoReturn:
    """The time is over and sessions are left: cut them if the plan says so."""
    left = look.left()
    if job.args["on_timeout"] != "cut":
        job.finish("not_done", look, "after %d s still open: %s" % (waited, left), waited_s=round(waited, 1))
    cut = look.sessions
    with job.owned():
        for row in look.mine:
            job.haproxy.order("shutdown sessions server %s/%s" % (row["backend"], job.server))
    job.changed = True
    job.begun = time.monotonic()
    look = job.wait(lambda now: now.idle, CUT_S)
    if look.idle:
        settled(job, look, waited, cut=cut)
    why = "cut after %d s, but still open: %s" % (waited, look.left())
    job.finish("not_done", look, why, waited_s=round(waited, 1), cut=cut)


# --------------------------------------------------------------------------------------------------- undo


def undo(job: Job) -> NoReturn:
    if not job.notes.data.get("servers"):
        give_up_marker(job)
        job.finish("done", job.look(), note="this change never took %s out" % job.server)
    with job.owned():
        look = job.look()
        foreign = somebody_elses(job, look)
        if not foreign and not job.notes.data["released"]:
            prepare(job, look)
    if foreign:
        job.finish("unknown", look, foreign)
    if not job.notes.data["released"]:
        look = come_back(job)
    with job.owned():
        job.notes.save(released=True)
        release_owner(job.module, job.server)
    job.finish("done", look, waited_s=round(time.monotonic() - job.begun, 1))


def give_up_marker(job: Job) -> None:
    """A drain that was refused has taken nothing but the marker; somebody else's is left alone."""
    with locked(job.module):
        kind, by = shut_out(job.module.params["owner"], job.server)
        if kind and kind != "locked":  # a controller that was shut out is told so, whatever it asks
            refuse(job.module, kind, by, job.server)
        if not kind:
            release_owner(job.module, job.server)


def somebody_elses(job: Job, look: Look) -> str:
    """Why the server is not ours to put back: it is in a state that neither we nor a restart of HAProxy left."""
    for row in look.mine:
        expected = (job.notes.left(row["backend"]), "ready", goal(job, row))
        if row["admin"] not in expected and not job.notes.data["released"]:
            return "%s/%s was put into %s by somebody else during this change" % (
                row["backend"], job.server, row["admin"],
            )  # fmt: skip
    return ""


def goal(job: Job, row: Dict[str, Any]) -> str:
    return str((job.notes.found(row["backend"]) or row)["admin"])


def prepare(job: Job, look: Look) -> None:
    """Everything that sends no traffic yet: weights, foreign states, and a fresh health check in drain."""
    restarted = job.notes.data["process"] != look.process
    for row in look.mine:
        found = job.notes.found(row["backend"]) or row
        if restarted and row["weight"] != found["weight"]:
            job.haproxy.order("set server %s/%s weight %d" % (row["backend"], job.server, found["weight"]))
            job.changed = True
        if goal(job, row) != "ready":
            if row["admin"] != goal(job, row):
                job.set_admin(row["backend"], goal(job, row))
        elif row["admin"] == "maint":
            job.set_admin(row["backend"], "drain")
    if not job.notes.data.get("rechecked"):
        recheck(job)


def recheck(job: Job) -> None:
    """Forget old health where the server gets no traffic, so that only a check from now on can bring it up."""
    for row in job.look().mine:
        if row["admin"] == "drain" and row["checked"] and goal(job, row) == "ready":
            job.haproxy.order("set server %s/%s health down" % (row["backend"], job.server))
    job.notes.save(rechecked=True)


def come_back(job: Job) -> Look:
    """Wait for health in drain, then make ready what was ready, and see that it serves."""
    within = float(job.args["ready_within"])
    waited = job.notes.clock("release")
    look = job.wait(lambda now: not ailing(job, now), max(0.0, within - waited))
    sick = ailing(job, look)
    if not sick:
        make_ready(job, look)
        look = job.wait(lambda now: not absent(job, now), max(1.0, within - waited))
        sick = absent(job, look)
    if not sick:
        return look
    waited = job.notes.clock("release")
    state = "running" if waited < within else "not_done"
    job.finish(state, look, "%s; %d of %d s waited" % (sick, waited, within), waited_s=round(waited, 1))


def ailing(job: Job, look: Look) -> str:
    """Why the server cannot take requests yet, "" if it can. What was down when found need not be up now."""
    for row in look.mine:
        found = job.notes.found(row["backend"]) or row
        if goal(job, row) != "ready" or not found["up"]:
            continue
        if not row["up"]:
            return "%s/%s is %s (last check: %s)" % (
                row["backend"], job.server, row["status"], row["check"] or "none yet",
            )  # fmt: skip
        refused = None if row["checked"] else reaches(row["address"], row["port"])
        if refused:
            return "%s/%s has no health check and does not answer: %s" % (row["backend"], job.server, refused)
    return ""


def make_ready(job: Job, look: Look) -> None:
    with job.owned():
        job.notes.forget_clock("drain")  # from here on there may be new sessions: another drain waits its full time
        for row in look.mine:
            if goal(job, row) == "ready" and row["admin"] != "ready":
                job.set_admin(row["backend"], "ready")


def absent(job: Job, look: Look) -> str:
    """Why the server does not serve as it did when found."""
    for row in look.mine:
        found = job.notes.found(row["backend"]) or row
        if serves(found) and not serves(row):
            return "%s/%s was made ready but does not serve: %s, weight %d (last check: %s)" % (
                row["backend"], job.server, row["status"], row["weight"], row["check"] or "none yet",
            )  # fmt: skip
    return ""


# -------------------------------------------------------------------------------------------------- probe


def probe(job: Job) -> NoReturn:
    look = job.look()
    out = all(row["admin"] != "ready" for row in look.mine)
    if direction_of(job.module) == "undo":
        done = not job.notes.ours
        why = "" if done else "%s is still out of service by this change" % job.server
    else:
        done = out and job.notes.ours and look.idle
        where = "out of service" if out else "in service"
        why = "" if done else "%s is %s, sessions open: %s" % (job.server, where, look.left())
    short = look.short_of(int(job.args["min_serving"]))
    marker = read_owner(job.server) or {}
    foreign = shut_out(job.module.params["owner"], job.server)[1]
    state, level = "done" if done else "not_done", job.haproxy.level()
    job.finish(state, look, why, short=short, owner=marker, foreign=foreign, level=level)


def main() -> None:
    module = open_module()
    try:
        {"probe": probe, "apply": apply, "undo": undo}[mode_of(module)](Job(module))
    except (HaproxyError, ValueError) as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
