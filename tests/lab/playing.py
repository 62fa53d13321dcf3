"""Plays one role on a lab host as the engine would, and reads its report from ansible-runner's own events."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ansible_runner

from gpuchange.lab import Host, Lab

PLAYBOOK = Path(__file__).resolve().parents[2] / "playbooks" / "phase.yml"
FINAL = ("done", "not_done", "unknown", "failed", "silent")


@dataclass
class Player:
    """One change on one lab host."""

    lab: Lab
    name: str
    change: str
    fence: int = 1

    @property
    def host(self) -> Host:
        return self.lab.host(self.name)

    def sh(self, command: str) -> str:
        return self.host.run(["sh", "-c", command])

    def variables(self, role: str, mode: str, args: dict[str, Any], direction: str) -> dict[str, Any]:
        phase, provider = role.split("_", 1)
        return {
            "gpuchange_role": role,
            "gpuchange_tasks": mode,
            "gpuchange_owner": {"change": self.change, "controller": "test", "fence": self.fence, "reason": "test"},
            "gpuchange_args": args,
            "gpuchange_step": {"phase": phase, "provider": provider, "direction": direction},
        }

    def play(self, role: str, mode: str, args: dict[str, Any], direction: str = "do") -> dict[str, Any]:
        """One play; its report, or {"state": "unreachable" | "failed" | "silent", "why"}."""
        said: dict[str, Any] = {"state": "silent", "why": ""}

        def on_event(event: dict[str, Any]) -> bool:
            data = event.get("event_data", {})
            if data.get("task") == "report" and event["event"] == "runner_on_ok":
                said.update(data["res"]["report"])
            elif event["event"] in ("runner_on_failed", "runner_on_unreachable"):
                said.update(data["res"], state=event["event"].rpartition("_")[2], why=data["res"].get("msg", ""))
            return False

        with tempfile.TemporaryDirectory() as folder:
            done = ansible_runner.run(
                private_data_dir=folder,
                playbook=str(PLAYBOOK),
                inventory=str(self.lab.inventory),
                limit=self.name,
                extravars=self.variables(role, mode, args, direction),
                event_handler=on_event,
                quiet=True,
                envvars={"ANSIBLE_PIPELINING": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
            )
            if said["state"] == "silent":
                said["why"] = done.stdout.read()[-2000:]
        return said

    def until(self, role: str, mode: str, args: dict[str, Any], direction: str = "do") -> dict[str, Any]:
        """Play again, as the engine's `again` would, until the report is final."""
        end = time.monotonic() + 300
        while True:
            said = self.play(role, mode, args, direction)
            if said["state"] in FINAL or time.monotonic() > end:
                return said

    def start(self, role: str, mode: str, args: dict[str, Any], direction: str = "do") -> subprocess.Popen[bytes]:
        """The same play in a process group of its own, to be killed."""
        call = [self.lab.name, self.name, self.change, self.fence, role, mode, args, direction]
        folders = [str(Path(__file__).parent), str(PLAYBOOK.parents[1])]
        env = dict(os.environ, PYTHONPATH=os.pathsep.join(folders))
        return subprocess.Popen([sys.executable, __file__, json.dumps(call)], env=env, start_new_session=True)


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """kill -9 of the play's whole process group; ansible-runner's own group goes with its controller."""
    for pid in _descendants(process.pid):
        with contextlib.suppress(ProcessLookupError):  # ended by itself meanwhile
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _descendants(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # the same
        return []
    return [pid, *(found for child in children for found in _descendants(int(child)))]


if __name__ == "__main__":
    lab_name, host, change, fence, *the_play = json.loads(sys.argv[1])
    Player(Lab.load(lab_name), host, change, fence).play(*the_play)
