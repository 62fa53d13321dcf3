#!/usr/bin/python3
"""Whether a host that is to be off really is: asked from the controller by ssh, ping and the plan's own command."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpuchange_knock
short_description: Knock at a host from the controller and hear who answers
description:
  - Runs on the controller. Knocks until somebody answers or args.window seconds have passed without any answer.
  - away means that no source said that the host is on, all the time; doubtful that ssh is silent but another is not.
  - The plan's power_status command says what a BMC says; anything but a last word "off" counts as on.
options:
  mode: {type: str, choices: [probe, apply, undo], required: true, description: Makes no difference.}
  owner: {type: dict, required: true, description: "change, controller, fence, reason, ticket"}
  args:
    type: dict
    default: {}
    description: "expected (may it be away?), window (s), power_status (argv), way (host, port, user, key, ...)"
  step: {type: dict, default: {}, description: "phase, provider, direction"}
author: gpuchange
"""
EXAMPLES = "- gpuchange_knock: {mode: probe, owner: '{{ gpuchange_owner }}', args: {expected: true, way: {host: gpu1}}}"
RETURN = "report: {type: dict, returned: always, description: 'stage (here, away, doubtful), aside, heard'}"

import re  # noqa: E402
import shlex  # noqa: E402
import time  # noqa: E402
from typing import Any, Dict, List, Tuple  # noqa: E402

from ansible.module_utils.gpuchange_host import args_of, finish, open_module, run  # noqa: E402

LONGEST_S = 40.0
PAUSE_S = 1.0
# ssh's words about a machine that is there, whether it lets us in or not ...
ANSWERED = re.compile(r"permission denied|host key verification|identification has changed|too many auth", re.I)
# ... and about one without a working sshd: only a kernel that runs can refuse. A jump host that reaches nobody closes
# the line too, and then names no port.
ALIVE = re.compile(r"connection refused|banner exchange|connection (reset|closed) by (?!unknown)", re.I)
SSH = [
    "ssh", "-T", "-o", "BatchMode=yes", "-o", "ControlPath=none",
    "-o", "ConnectTimeout=5", "-o", "ConnectionAttempts=1",
]  # fmt: skip


def ssh(way: Dict[str, Any]) -> Tuple[str, str]:
    """(here, doubtful or away; the words about it). Goes the way that Ansible goes, jump hosts included."""
    flags = shlex.split("%s %s" % (way.get("common", ""), way.get("extra", "")))
    for flag, key in (("-p", "port"), ("-l", "user"), ("-i", "key")):
        flags += [flag, str(way[key])] if way.get(key) else []
    rc, _, err = run([*SSH, *flags, "--", str(way["host"]), "true"], timeout=15.0)
    if rc not in (124, 255) or ANSWERED.search(err):
        return "here", "ssh: answers"
    said = (err.strip().splitlines() or ["nothing"])[-1].strip()[:120]
    if rc == 124 or ALIVE.search(err):
        return "doubtful", "ssh: a machine is there (%s)" % said
    return "away", "ssh: no answer (%s)" % said


def ping(address: str) -> Tuple[bool, str]:
    rc, _, _ = run(["ping", "-n", "-c", "1", "-W", "1", "--", address], timeout=5.0)
    if rc == 127:
        return False, ""
    return rc == 0, "ping: answers" if rc == 0 else "ping: no answer"


def power(argv: List[str]) -> Tuple[bool, str]:
    """What the plan's command says. It must end with 0 and say `off` as its last word, or the host counts as on."""
    if not argv:
        return False, ""
    rc, out, err = run(argv, timeout=15.0)
    words = (out if rc == 0 else err or out).split()
    off = rc == 0 and bool(words) and words[-1].strip(".\"'").lower() == "off"
    said = " ".join(words)[-120:] or "nothing"
    return not off, "%s: %s" % (argv[0].rpartition("/")[2], said if rc == 0 else "failed (%d): %s" % (rc, said))


def listen(args: Dict[str, Any]) -> Tuple[str, List[str]]:
    """(stage, what was heard) of one round."""
    way = dict(args["way"])
    stage, said = ssh(way)
    if stage == "here":
        return stage, [said]
    others = [ping(str(way["host"])), power(list(args.get("power_status") or ()))]
    heard = [said, *(words for _, words in others if words)]
    return "doubtful" if any(on for on, _ in others) else stage, heard


def main() -> None:
    module = open_module()
    args = args_of(module)
    if not args.get("expected"):
        finish(module, "done", stage="here", aside=False, heard=[])
    began = time.monotonic()
    window = min(float(args.get("window") or 0), LONGEST_S)
    stage, heard = listen(args)
    while stage == "away" and time.monotonic() - began < window:
        time.sleep(PAUSE_S)
        stage, heard = listen(args)
    watched = "watched for %d s" % round(time.monotonic() - began)
    finish(module, "done", stage=stage, aside=stage != "here", heard=[*heard, watched] if stage == "away" else heard)


if __name__ == "__main__":
    main()
