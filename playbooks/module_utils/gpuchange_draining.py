"""How a server leaves a balancer and comes back, whatever the balancer: who waits for what, what is said. Python 3.8.

A subclass of Job says how its balancer is looked at and told; `carry_out` plays the mode asked for. A look has `mine`
(rows of our server), `idle`, `sessions`, `left()`, `short_of(min_serving)` and `report()`.
"""

from __future__ import annotations

import re
import time
from typing import Any, Callable, Dict, NoReturn

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpuchange_host import (
    args_of,
    direction_of,
    finish,
    locked,
    mode_of,
    owned,
    read_owner,
    refuse,
    release_owner,
    shut_out,
    state_path,
)
from ansible.module_utils.gpuchange_notes import Notes

NAME = re.compile(r"[A-Za-z0-9_.:-]{1,255}")  # it becomes part of file names, and of some balancers' commands
POLL_S = 0.2
CUT_S = 5.0
TRY_AGAIN_S = 1.0
DEFAULTS: Dict[str, Any] = {
    **{"timeout": 300, "on_timeout": "fail", "min_serving": 1, "ready_within": 300},
    **{"wait_s": 40.0, "among": 1, "balancer": ""},
}


class Job:
    """One call for one server of one balancer. Raises ValueError for a server that could not be a file's name."""

    notes_in = Notes

    def __init__(self, module: AnsibleModule, kind: str) -> None:
        self.module, self.args = module, dict(DEFAULTS, **args_of(module))
        self.server: str = self.args["server"]
        if not NAME.fullmatch(self.server):
            raise ValueError("%r cannot be the name of a server: letters, digits and _ . : - only" % self.server)
        self.notes = self.notes_in(state_path(module, "%s-%s.json" % (kind, self.server)))
        self.changed = False
        self.begun = time.monotonic()

    # -- what a balancer must know -------------------------------------------------------------------------------------

    def look(self) -> Any:
        raise NotImplementedError

    def take_out(self, look: Any) -> None:
        """Let it get nothing new. Called with the lock held, once enough others serve."""
        raise NotImplementedError

    def close(self, look: Any) -> None:
        """After the last session: whatever still lets one in. Called with the lock held."""

    def cut(self, look: Any) -> None:
        """End the sessions that are left. Called with the lock held."""
        raise NotImplementedError

    def somebody_elses(self, look: Any) -> str:
        """Why the server is not ours to put back. Called with the lock held."""
        raise NotImplementedError

    def prepare(self, look: Any) -> None:
        """What is put back before any request may come. Called with the lock held."""

    def ailing(self, look: Any) -> str:
        """Why the server cannot take requests yet, "" if it can. What was down when found need not be up now."""
        raise NotImplementedError

    def make_ready(self, look: Any) -> None:
        """Let requests come again. Called with the lock held."""
        raise NotImplementedError

    def absent(self, look: Any) -> str:
        """Why the server does not serve as it did when found; "" if it does."""
        raise NotImplementedError

    def is_out(self, look: Any) -> bool:
        return all(row["admin"] != "ready" for row in look.mine)

    def foretold(self, look: Any) -> Dict[str, Any]:
        """What else a preview should say of this balancer."""
        return {}

    def found(self) -> Dict[str, Any]:
        """{backend: our server there as this change found it}."""
        raise NotImplementedError

    # -- what all have in common ---------------------------------------------------------------------------------------

    @property
    def share_s(self) -> float:
        return float(self.args["wait_s"]) / max(1, int(self.args["among"]))

    def owned(self) -> Any:
        return owned(self.module, wait_s=10.0, thing=self.server)

    def wait(self, until: Callable[[Any], bool], limit_s: float) -> Any:
        """Look again and again until `until` holds, at most `limit_s` seconds and this call's share of the wait."""
        deadline = min(time.monotonic() + limit_s, self.begun + self.share_s)
        look = self.look()
        while not until(look) and time.monotonic() < deadline:
            time.sleep(POLL_S)
            look = self.look()
        return look

    def finish(self, state: str, look: Any, why: str = "", **fields: Any) -> NoReturn:
        fields.update(look.report(), found=self.found(), balancer=self.args["balancer"], server=self.server)
        finish(self.module, state, why=why and self.at(why), changed=self.changed, **fields)
        raise SystemExit(0)

    def at(self, text: str) -> str:
        """`text` with the balancer that it speaks of."""
        return "%s: %s" % (self.args["balancer"], text) if self.args["balancer"] else text


def carry_out(job: Job) -> NoReturn:
    {"probe": probe, "apply": apply, "undo": undo}[mode_of(job.module)](job)
    raise SystemExit(0)


# -------------------------------------------------------------------------------------------------- apply


def apply(job: Job) -> NoReturn:
    short = _leave(job)
    while short and time.monotonic() - job.begun < job.share_s:
        time.sleep(TRY_AGAIN_S)
        short = _leave(job)
    if short:
        job.finish("not_done", job.look(), "%s was not taken out: %s" % (job.server, short))
    timeout = float(job.args["timeout"])
    look = job.wait(lambda now: bool(now.idle), max(0.0, timeout - job.notes.clock("drain")))
    waited = job.notes.clock("drain")
    if look.idle:
        _settled(job, look, waited)
    if waited < timeout:
        why = "%s sessions left (%s), %d of %d s waited" % (job.server, look.left(), waited, timeout)
        job.finish("running", look, why, waited_s=round(waited, 1))
    _timed_out(job, look, waited)


def _leave(job: Job) -> str:
    """Take the server out; "" once that is so, else why it may not leave yet.

    Counting and acting under one lock: two hosts that leave at the same moment must not count on each other.
    """
    with job.owned():
        look = job.look()
        short = str(look.short_of(int(job.args["min_serving"])))
        if not short:
            job.take_out(look)
        return short


def _settled(job: Job, look: Any, waited: float, **fields: Any) -> NoReturn:
    with job.owned():
        job.close(look)
    job.finish("done", job.look(), waited_s=round(waited, 1), **fields)


def _timed_out(job: Job, look: Any, waited: float) -> NoReturn:
    """The time is over and sessions are left: cut them if the plan says so."""
    left = look.left()
    if job.args["on_timeout"] != "cut":
        job.finish("not_done", look, "after %d s still open: %s" % (waited, left), waited_s=round(waited, 1))
    cut = look.sessions
    with job.owned():
        job.cut(look)
    job.changed = True
    job.begun = time.monotonic()
    look = job.wait(lambda now: bool(now.idle), CUT_S)
    if look.idle:
        _settled(job, look, waited, cut=cut)
    why = "cut after %d s, but still open: %s" % (waited, look.left())
    job.finish("not_done", look, why, waited_s=round(waited, 1), cut=cut)


# --------------------------------------------------------------------------------------------------- undo


def undo(job: Job) -> NoReturn:
    if not job.notes.data.get("servers"):
        _give_up_marker(job)
        job.finish("done", job.look(), note="this change never took %s out" % job.server)
    with job.owned():
        look = job.look()
        foreign = "" if job.notes.data["released"] else job.somebody_elses(look)
        if not foreign and not job.notes.data["released"]:
            job.prepare(look)
    if foreign:
        job.finish("unknown", look, foreign)
    if not job.notes.data["released"]:
        look = _come_back(job)
    with job.owned():
        job.notes.save(released=True)
        release_owner(job.module, job.server)
    job.finish("done", look, waited_s=round(time.monotonic() - job.begun, 1))


def _give_up_marker(job: Job) -> None:
    """A drain that was refused has taken nothing but the marker; somebody else's is left alone."""
    with locked(job.module):
        kind, by = shut_out(job.module.params["owner"], job.server)
        if kind and kind != "locked":  # a controller that was shut out is told so, whatever it asks
            refuse(job.module, kind, by, job.server)
        if not kind:
            release_owner(job.module, job.server)


def _come_back(job: Job) -> Any:
    """Wait until it can take requests while it gets none, then let them come, and see that it serves."""
    within = float(job.args["ready_within"])
    waited = job.notes.clock("release")
    look = job.wait(lambda now: not job.ailing(now), max(0.0, within - waited))
    sick = job.ailing(look)
    if not sick:
        with job.owned():
            job.notes.forget_clock("drain")  # from here on sessions may come: another drain waits its full time
            job.make_ready(look)
        look = job.wait(lambda now: not job.absent(now), max(1.0, within - waited))
        sick = job.absent(look)
    if not sick:
        return look
    waited = job.notes.clock("release")
    state = "running" if waited < within else "not_done"
    job.finish(state, look, "%s; %d of %d s waited" % (sick, waited, within), waited_s=round(waited, 1))


# -------------------------------------------------------------------------------------------------- probe


def probe(job: Job) -> NoReturn:
    look = job.look()
    if direction_of(job.module) == "undo":
        done = not job.notes.ours
        why = "" if done else "%s is still out of service by this change" % job.server
    else:
        done = job.is_out(look) and job.notes.ours and look.idle
        where = "out of service" if job.is_out(look) else "in service"
        why = "" if done else "%s is %s, sessions open: %s" % (job.server, where, look.left())
    short = look.short_of(int(job.args["min_serving"]))
    marker = read_owner(job.server) or {}
    foreign = shut_out(job.module.params["owner"], job.server)[1]
    state = "done" if done else "not_done"
    job.finish(state, look, why, short=short, owner=marker, foreign=foreign, **job.foretold(look))
