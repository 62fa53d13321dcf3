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

from typing import Any, Dict  # noqa: E402

from ansible.module_utils import gpuchange_draining as draining  # noqa: E402
from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible.module_utils.gpuchange_connections import reaches  # noqa: E402
from ansible.module_utils.gpuchange_haproxy_api import Haproxy, HaproxyError, serves  # noqa: E402
from ansible.module_utils.gpuchange_haproxy_job import Look, ServerNotes, check_names  # noqa: E402
from ansible.module_utils.gpuchange_host import open_module  # noqa: E402

SOCKET = "/run/haproxy/admin.sock"


class Job(draining.Job):
    """One call for one server of one HAProxy."""

    notes: ServerNotes
    notes_in = ServerNotes

    def __init__(self, module: AnsibleModule) -> None:
        super().__init__(module, "haproxy")
        check_names(self.args.get("backends") or [])
        self.haproxy = Haproxy(self.args.get("socket", SOCKET))

    def look(self) -> Look:
        return Look(self.haproxy, list(self.args.get("backends") or []), self.server)

    def found(self) -> Dict[str, Any]:
        return {backend: kept["found"] for backend, kept in (self.notes.data.get("servers") or {}).items()}

    def foretold(self, look: Look) -> Dict[str, Any]:
        return {"level": self.haproxy.level()}

    def set_admin(self, backend: str, word: str) -> None:
        self.notes.set_left(backend, word)
        self.haproxy.set_admin(backend, self.server, word)
        self.changed = True

    # -- out -----------------------------------------------------------------------------------------------------------

    def take_out(self, look: Look) -> None:
        """Set the server to drain wherever it is ready."""
        if not self.notes.ours:
            self.notes.begin_with(look)
        self.notes.forget_clock("release")
        self.notes.save(rechecked=False)
        for row in look.mine:
            if row["admin"] == "ready":
                self.set_admin(row["backend"], "drain")
        still = [row["backend"] for row in self.look().mine if row["admin"] == "ready"]
        if still:
            raise HaproxyError("HAProxy accepted the drain, but the server is still ready in %s" % ", ".join(still))

    def close(self, look: Look) -> None:
        """Close the door to persistent clients too, where there are any."""
        for row in look.mine:
            if row["persistent"] and row["admin"] == "drain":
                self.set_admin(row["backend"], "maint")

    def cut(self, look: Look) -> None:
        for row in look.mine:
            self.haproxy.order("shutdown sessions server %s/%s" % (row["backend"], self.server))

    # -- back ----------------------------------------------------------------------------------------------------------

    def as_found(self, row: Dict[str, Any]) -> Dict[str, Any]:
        return self.notes.found(row["backend"]) or row

    def goal(self, row: Dict[str, Any]) -> str:
        return str(self.as_found(row)["admin"])

    def somebody_elses(self, look: Look) -> str:
        """The server is in a state that neither we nor a restart of HAProxy left."""
        for row in look.mine:
            if row["admin"] not in (self.notes.left(row["backend"]), "ready", self.goal(row)):
                return "%s/%s was put into %s by somebody else during this change" % (
                    row["backend"], self.server, row["admin"],
                )  # fmt: skip
        return ""

    def prepare(self, look: Look) -> None:
        """Everything that sends no traffic yet: weights, foreign states, and a fresh health check in drain."""
        restarted = self.notes.data["process"] != look.process
        for row in look.mine:
            found = self.as_found(row)
            if restarted and row["weight"] != found["weight"]:
                self.haproxy.order("set server %s/%s weight %d" % (row["backend"], self.server, found["weight"]))
                self.changed = True
            if self.goal(row) != "ready":
                if row["admin"] != self.goal(row):
                    self.set_admin(row["backend"], self.goal(row))
            elif row["admin"] == "maint":
                self.set_admin(row["backend"], "drain")
        if not self.notes.data.get("rechecked"):
            self.recheck()

    def recheck(self) -> None:
        """Forget old health where the server gets no traffic, so that only a check from now on can bring it up."""
        for row in self.look().mine:
            if row["admin"] == "drain" and row["checked"] and self.goal(row) == "ready":
                self.haproxy.order("set server %s/%s health down" % (row["backend"], self.server))
        self.notes.save(rechecked=True)

    def ailing(self, look: Look) -> str:
        for row in look.mine:
            if self.goal(row) != "ready" or not self.as_found(row)["up"]:
                continue
            if not row["up"]:
                return "%s/%s is %s (last check: %s)" % (
                    row["backend"], self.server, row["status"], row["check"] or "none yet",
                )  # fmt: skip
            refused = None if row["checked"] else reaches(row["address"], row["port"])
            if refused:
                return "%s/%s has no health check and does not answer: %s" % (row["backend"], self.server, refused)
        return ""

    def make_ready(self, look: Look) -> None:
        for row in look.mine:
            if self.goal(row) == "ready" and row["admin"] != "ready":
                self.set_admin(row["backend"], "ready")

    def absent(self, look: Look) -> str:
        for row in look.mine:
            if serves(self.as_found(row)) and not serves(row):
                return "%s/%s was made ready but does not serve: %s, weight %d (last check: %s)" % (
                    row["backend"], self.server, row["status"], row["weight"], row["check"] or "none yet",
                )  # fmt: skip
        return ""


def main() -> None:
    module = open_module()
    try:
        draining.carry_out(Job(module))
    except (HaproxyError, ValueError) as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
