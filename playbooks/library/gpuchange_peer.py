#!/usr/bin/python3
"""One rank of a distributed PyTorch test between a changed host and a peer, as a host unit."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpuchange_peer
short_description: A two-rank all-reduce and DDP step between two hosts
description:
  - Played once on the peer (rank 0, which listens) and once on the changed host (rank 1). The work is a host unit that
    ends by itself in time; a call starts it, waits for it for some seconds, and tells how far it is.
  - The peer may serve meanwhile. Its owner marker is neither taken nor touched; it only must not be another change's.
  - With C(look) nothing is started; it only tells whether PyTorch can be had and whether the port is free.
options:
  mode: {type: str, choices: [probe, apply, undo], required: true, description: What to do.}
  owner: {type: dict, required: true, description: "change, controller, fence, reason, ticket"}
  args:
    type: dict
    default: {}
    description: >-
      rank: 0 | 1; host: the changed host; name: the host that this rank runs on; address, port: where rank 0 listens;
      backend: auto | nccl | gloo; python: interpreter or ""; env: dict; timeout_s; generation: raised by an operator's
      retry; look: bool; wait_s.
      second: what rank 1 said when it was looked at (for rank 0); first: what rank 0 said (for rank 1)
  step: {type: dict, default: {}, description: "phase, provider, direction"}
author: gpuchange
"""
EXAMPLES = (
    "- gpuchange_peer: {mode: apply, owner: '{{ gpuchange_owner }}', args: {rank: 0, port: 29517, address: gpu2}}"
)
RETURN = "report: {type: dict, returned: always, description: 'state, why, host, alone, busy, result, first'}"

import contextlib  # noqa: E402
import hashlib  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
from typing import Any, Dict, NoReturn  # noqa: E402

from ansible.module_utils import gpuchange_rank  # noqa: E402
from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible.module_utils.gpuchange_host import (  # noqa: E402
    args_of,
    finish,
    guard,
    locked,
    mode_of,
    open_module,
    owned,
    read_text,
    state_dir,
    write_atomic,
)
from ansible.module_utils.gpuchange_torch import ask  # noqa: E402
from ansible.module_utils.gpuchange_unit import (  # noqa: E402
    forget_unit,
    host_unit,
    install_script,
    unit_name,
    unit_state,
    wait_for_unit,
)

LOOK_DEADLINE_S = 40.0
END_S = 10.0
MARGIN_S = 20.0  # a rank ends itself; only one that hangs in the kernel is ended by its unit


class Part:
    """This host's part: one rank and its unit. The peer may be tested with by several hosts of a change."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module, self.args = module, args_of(module)
        self.rank, self.port = int(self.args.get("rank") or 0), int(self.args.get("port") or 0)
        token = hashlib.sha256(str(self.args.get("host")).encode()).hexdigest()[:8]
        self.step = "rank%d_%s" % (self.rank, token)
        self.generation = int(self.args.get("generation") or 0)
        self.unit = unit_name(module, self.step, self.generation)
        self.env = {str(key): str(value) for key, value in dict(self.args.get("env") or {}).items()}

    def finish(self, state: str, why: str = "", **more: Any) -> NoReturn:
        more = dict(more, first=self.args["first"]) if self.args.get("first") else more
        finish(self.module, state, why=why, host=str(self.args.get("name") or ""), **more)

    def look(self) -> NoReturn:
        """Preflight's question. A port that is taken now may be free then, so it is told and decides nothing."""
        taken = self.rank == 0 and gpuchange_rank.port_taken(self.port)
        env = ["%s=%s" % pair for pair in self.env.items()]
        found = ask(str(self.args.get("python") or ""), LOOK_DEADLINE_S, env)
        result = {"torch": found["version"], "cards": found["cards"], "ok": not found["why"], "why": found["why"]}
        self.finish("done", result=result, busy=taken)

    def say(self, found: Dict[str, Any]) -> NoReturn:
        """The unit's state as a report; only a result that says ok is done."""
        if found["state"] == "running":
            at = spoken(read_text(self.unit.file("log"))).get("step") or "starting"
            self.finish("running", "rank %d on %s is %s" % (self.rank, self.args.get("name"), at), changed=True)
        if found["state"] == "absent":
            self.finish("not_done", "not begun", begun=False)
        if found["state"] == "lost":
            self.finish("not_done", "it was cut short by a restart or a kill", alone=True)
        result = spoken(str(found.get("out") or "")).get("result")
        if not isinstance(result, dict):
            self.finish("not_done", "it %s" % end_of(found), alone=True)
        first = dict(self.args.get("first") or {})
        if result.get("ok") and first.get("state") == "running":
            self.finish("running", str(first.get("why") or ""), result=result)
        state, alone = "done" if result.get("ok") else "not_done", bool(result.get("alone"))
        self.finish(state, str(result.get("why") or ""), result=result, alone=alone)

    def begin(self) -> Dict[str, Any]:
        """Start this rank's unit, or attach to it."""
        path = install_script(self.module, gpuchange_rank, state_dir(self.module))
        keys = ("rank", "address", "port", "backend", "timeout_s")
        job = json.dumps(dict({key: self.args[key] for key in keys}, stop=self.unit.file("stop")))
        argv = [str(self.args.get("python") or "python3"), path, job]
        deadline_s = float(self.args["timeout_s"]) + MARGIN_S
        wait_s = float(self.args.get("wait_s", 1.0 if self.rank == 0 else 15.0))
        return host_unit(self.module, self.step, argv, wait_s, deadline_s, self.env, self.generation)

    def anew(self) -> None:
        """End and forget what is left of a test whose other rank never began."""
        if unit_state(self.unit)["state"] == "running":
            write_atomic(self.unit.file("stop"), "")
            wait_for_unit(self.unit, END_S)
        forget_unit(self.unit)
        for stale in ("stop", "log"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.unit.file(stale))


def spoken(text: str) -> Dict[str, Any]:
    """The last thing that the rank said; {} if nothing."""
    for line in reversed(text.splitlines()):
        if line.startswith(gpuchange_rank.MARK):
            with contextlib.suppress(ValueError):
                said = json.loads(line[len(gpuchange_rank.MARK) :])
                return said if isinstance(said, dict) else {}
    return {}


def end_of(found: Dict[str, Any]) -> str:
    tail = str(found.get("out") or "").strip().splitlines()[-1:]
    end = "did not end in time" if found.get("timed_out") else "ended with %s" % found.get("rc")
    return "%s%s" % (end, ": " + tail[0][:300] if tail else "")


def listen(part: Part) -> NoReturn:
    """Rank 0. A test is begun on both sides or anew: what an earlier controller left half begun does not count."""
    with locked(part.module):
        guard(part.module)
        if (part.args.get("second") or {}).get("begun") is False:
            part.anew()
            if gpuchange_rank.port_taken(part.port):
                part.finish("running", "port %d is in use on %s" % (part.port, part.args.get("name")), busy=True)
        part.say(part.begin())


def join(part: Part) -> NoReturn:
    """Rank 1: only when rank 0 is there, and as long as that lasts."""
    first = dict(part.args.get("first") or {})
    with owned(part.module):
        if unit_state(part.unit)["state"] == "absent" and (first.get("busy") or first.get("state") == "not_done"):
            part.finish(str(first["state"]), str(first.get("why") or ""), begun=False)
        part.say(part.begin())


def main() -> None:
    module = open_module()
    part = Part(module)
    if mode_of(module) == "undo":
        part.finish("done")
    if part.args.get("look"):
        part.look()
    if mode_of(module) == "probe":
        part.say(unit_state(part.unit))
    (join if part.rank else listen)(part)


if __name__ == "__main__":
    main()
