#!/usr/bin/python3
"""Take a server out of nginx and put it back as it was found. Runs on the balancer."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpuchange_nginx
short_description: Drain or release one server of an nginx
description:
  - apply marks the server C(down) in nginx's configuration once enough others can be reached, tests it, reloads nginx
    once, and waits until no worker, those left behind by the reload included, holds a connection to the server.
  - undo waits until the server answers again, takes the mark away, tests and reloads. Every byte of the file is then as
    it was found. A file that somebody else wrote meanwhile is not touched.
  - A reload concerns everybody's streams; C(worker_shutdown_timeout) ends them, so a preview tells it.
options:
  mode: {type: str, choices: [probe, apply, undo], required: true, description: What to do.}
  owner: {type: dict, required: true, description: "change, controller, fence, reason, ticket"}
  args:
    type: dict
    default: {}
    description: >-
      server (as nginx has it), host and address (of the inventory; its address will do where server is only its name),
      backends (upstreams; empty: all that have it), config, timeout, on_timeout (fail or cut), min_serving,
      ready_within, health (path or empty), wait_s (longest wait of this call), among (balancers that share that wait),
      balancer (name for people)
  step: {type: dict, default: {}, description: "phase, provider, direction"}
author: gpuchange
"""
EXAMPLES = "- gpuchange_nginx: {mode: apply, owner: '{{ gpuchange_owner }}', args: {server: h1, address: 10.0.0.11}}"
RETURN = "report: {type: dict, returned: always, description: 'state, servers, members, sessions, found, waited_s'}"

import os  # noqa: E402
import signal  # noqa: E402
from typing import Any, Dict, List  # noqa: E402

from ansible.module_utils import gpuchange_draining as draining  # noqa: E402
from ansible.module_utils import gpuchange_nginx_conf as conf  # noqa: E402
from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible.module_utils.gpuchange_host import open_module  # noqa: E402
from ansible.module_utils.gpuchange_nginx_conf import NginxError  # noqa: E402
from ansible.module_utils.gpuchange_nginx_job import (  # noqa: E402
    Look,
    Nginx,
    as_server,
    edited_by_others,
    mark,
    unreachable,
)

CONFIG = "/etc/nginx/nginx.conf"


class Job(draining.Job):
    """One call for one server of one nginx."""

    def __init__(self, module: AnsibleModule) -> None:
        super().__init__(module, "nginx")

    def look(self) -> Look:
        names = [self.server]
        if self.server == self.args.get("host"):  # the plan has no name of its own for it: its address will do
            names += [self.args["address"]] if self.args.get("address") else []
        return Look(Nginx(self.args.get("config", CONFIG)), list(self.args.get("backends") or []), names)

    @property
    def kept(self) -> Dict[str, Dict[str, Any]]:
        """{upstream: our server's row as this change found it}."""
        return dict(self.notes.data.get("servers") or {})

    def found(self) -> Dict[str, Any]:
        return {upstream: row["seen"] for upstream, row in self.kept.items()}

    def foretold(self, look: Look) -> Dict[str, Any]:
        look.nginx.check("as it is")
        limit = conf.value(look.nginx.directives, "worker_shutdown_timeout")
        return {"reload": {"others": look.cut_by_reload(), "limit": limit, "not_loaded": look.nginx.not_loaded()}}

    def write(self, look: Look, rows: List[Dict[str, Any]], down: bool) -> None:
        """Mark and reload, or only reload if a call was ended between the two."""
        if rows:
            look.nginx.check("before anything was changed")
            self.notes.save(loaded=False)
            mark(look.nginx, rows, down)
            self.changed = True
        if not self.notes.data.get("loaded"):
            look.nginx.reload()
            self.notes.save(loaded=True)

    # -- out -----------------------------------------------------------------------------------------------------------

    def take_out(self, look: Look) -> None:
        edited = edited_by_others({row["file"] for row in look.mine})
        if edited:
            raise NginxError("%s was edited by somebody else while servers are marked down in it" % edited)
        if not self.notes.ours:
            kept = {row["upstream"]: dict(row, seen=as_server(row)) for row in look.mine}
            self.notes.begin(servers=kept, loaded=True)
        self.notes.forget_clock("release")
        self.write(look, [row for row in look.mine if row["admin"] == "ready"], down=True)

    def cut(self, look: Look) -> None:
        """nginx can end no single stream: old workers that carry some of ours end, with what else they carry."""
        for pid, count in look.carried.items():
            if count and look.workers[pid]:
                os.kill(pid, signal.SIGTERM)

    # -- back ----------------------------------------------------------------------------------------------------------

    def ours(self, look: Look) -> List[Dict[str, Any]]:
        """The rows that are down now and were not when they were found."""
        return [row for row in look.mine if row["admin"] == "down" and self.was(row)["admin"] == "ready"]

    def was(self, row: Dict[str, Any]) -> Dict[str, Any]:
        return self.kept.get(row["upstream"], row)

    def somebody_elses(self, look: Look) -> str:
        edited = edited_by_others({row["file"] for row in look.mine})
        return edited and (
            "%s was edited by somebody else during this change: take `down` of %s away yourself and reload nginx"
            % (edited, ", ".join(row["name"] for row in self.ours(look)) or self.server)
        )

    def ailing(self, look: Look) -> str:
        for row in self.ours(look):
            trouble = unreachable(row, str(self.args.get("health") or ""))
            if trouble and self.was(row)["seen"]["up"]:
                return "%s/%s does not answer: %s" % (row["upstream"], row["name"], trouble)
        return ""

    def make_ready(self, look: Look) -> None:
        self.write(look, self.ours(look), down=False)

    def absent(self, look: Look) -> str:
        still = self.ours(look)
        return "%s is still marked down" % ", ".join(row["name"] for row in still) if still else ""


def main() -> None:
    module = open_module()
    try:
        draining.carry_out(Job(module))
    except (NginxError, OSError, ValueError) as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
