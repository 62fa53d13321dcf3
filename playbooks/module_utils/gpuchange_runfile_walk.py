"""The steps of a driver change by NVIDIA's .run installer on a host: files as a unit, modules, reboot. Looks first."""

from __future__ import annotations

import os
import re
import sys
from typing import Any, Dict, List, NoReturn, Optional

from ansible.module_utils import gpuchange_runfile_unit
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpuchange_driver import driver_state
from ansible.module_utils.gpuchange_driver_walk import DEADLINE_S, DriverWalk
from ansible.module_utils.gpuchange_host import args_of, boot_id, change_of, read_json, state_path, write_atomic
from ansible.module_utils.gpuchange_runfile_look import (
    MANIFEST,
    STORE,
    content_digest,
    installed_run,
    library_versions,
    missing,
    sha256,
)
from ansible.module_utils.gpuchange_runfile_plan import had_dkms, installer_argv
from ansible.module_utils.gpuchange_unit import host_unit, install_script, unit_name

BEFORE = "runfile-before.json"
STEPS = ("install", "complete")
BESIDE = "--allow-installation-with-running-driver"


class Goal:
    """Where one direction leads: the driver's version ("" for none), and the installer to run for that."""

    def __init__(self, version: str, installer: str, flavour: str, dkms: bool, digest: str = "") -> None:
        self.version, self.installer, self.flavour, self.dkms = version, installer, flavour, dkms
        self.digest = digest
        """Of the installed files as they must be again; "" on the way forward: nobody knows it yet."""

    @classmethod
    def forward(cls, transaction: Dict[str, Any]) -> "Goal":
        return cls(transaction["driver"], transaction["driver"], transaction["module"], transaction["dkms"])

    @classmethod
    def back(cls, transaction: Dict[str, Any], before: Dict[str, Any]) -> "Goal":
        """The earlier installer; where there was no driver, the new one takes its own away."""
        version = before["version"]
        flavour = ("open" if before["open"] else "proprietary") if before["driver"] else ""
        return cls(version, version or transaction["driver"], flavour, before["dkms"], before["digest"])


def look_before() -> Dict[str, Any]:
    """What a rollback leads back to, saved before the first action."""
    now, state = installed_run(), driver_state()
    return {
        "version": now["version"],
        "digest": content_digest(now["paths"]),
        "files": len(now["paths"]),
        "dkms": had_dkms(now["version"]),
        "open": state["open"],
        "driver": state["loaded"],
        "boot_id": boot_id(),
    }


class RunfileWalk(DriverWalk):
    """One call of the module, in one direction."""

    works = (*STEPS, "build")

    def __init__(self, module: AnsibleModule, goal: Goal, before: Dict[str, Any], options: List[str]) -> None:
        super().__init__(module, goal.version)
        self.goal, self.before, self.options = goal, before, options

    def end(self, state: str, why: str = "", **more: Any) -> NoReturn:
        now = installed_run()
        self.report(
            state,
            why=why,
            installed=now["version"],
            files=len(now["paths"]),
            libraries=library_versions(),
            left=len(self.remaining()),
            **more,
        )

    def remaining(self) -> List[str]:
        """What of the driver's files still differs from the goal, one sentence each."""
        now = installed_run()
        if now["version"] != self.goal.version:
            said = "the installed driver is %s, not %s"
            return [said % (now["version"] or "none", self.goal.version or "none")]
        if not self.goal.version:
            return []
        odd = [
            "%s is %s, not %s" % (name, version or "absent", self.goal.version)
            for name, version in library_versions().items()
            if version != self.goal.version
        ]
        lost = missing(now["paths"])
        return odd + (["%d of the driver's files are gone, %s first" % (len(lost), lost[0])] if lost else [])

    def differs(self) -> bool:
        """Going back: whether the files are not, byte for byte, those of before, and nothing was done about it yet."""
        if not self.goal.digest or "finished" in (self._state("install"), self._state("complete")):
            return False
        return content_digest(installed_run()["paths"]) != self.goal.digest

    def broken_off(self) -> bool:
        """An installer that was cut off is run again whatever it seems to have done: its list is written as it goes."""
        return self._state("install") == "lost" and self._state("complete") != "finished"

    def look(self) -> NoReturn:
        """Answer a probe from the real state."""
        self.look_for_work()
        left = self.remaining()
        if left or self.broken_off() or self.differs():
            self.end("not_done", "; ".join(left) or "the driver's files are not yet as wanted")
        self.look_at_driver()
        self.end("done")

    # ------------------------------------------------------------------------------------------- the files

    def files(self) -> None:
        """Bring the driver's files to the goal by one installer; ends the module while it runs or when it failed."""
        self._await_other_direction()
        for step in STEPS:
            if self._state(step) == "running":
                self._unit(step)
        if self.remaining() or self.broken_off() or self.differs():
            self._transact()
            left = self.remaining()
            if left:
                self.end("not_done", "the installer ended, but %s" % "; ".join(left))
        if self._state("complete") != "absent":
            self.repaired.append("previous attempt was interrupted inside the installer; it was run again")

    def _transact(self) -> None:
        step = "install" if self._state("install") != "lost" else "complete"
        if step == "complete" and self._state(step) == "lost":
            self.end("unknown", "the installer was broken off twice; look at /var/log/nvidia-installer.log on the host")
        self._unit(step)

    def _unit(self, step: str) -> None:
        """Start or attend the installer; returns when it has ended well, ends the module otherwise."""
        job = unit_name(self.module, step, self.generation).file("job")
        if self._state(step) == "absent":
            write_atomic(job, self._job())
        argv = [sys.executable, "-I", install_script(self.module, gpuchange_runfile_unit), job]
        deadline = float(args_of(self.module).get("deadline_s") or DEADLINE_S)
        done = host_unit(self.module, step, argv, 30.0, deadline, generation=self.generation)
        self.changed = True
        if done["state"] == "running":
            said = "installer of change %s still active on this host since %s (%s); not starting another"
            self.end("running", said % (change_of(self.module), done.get("started", "now"), done["unit"]))
        if done["state"] == "lost":
            self.end("running", "%s was interrupted; running the installer again" % done["unit"])
        if done["rc"]:
            self.end("not_done", failure(done), log=done["out"][-6000:])

    def _job(self) -> Dict[str, Any]:
        path = stored(self.module, self.goal.installer)
        if not path:
            self.end("not_done", "the installer of driver %s is not in this change's store" % self.goal.installer)
        folder = state_path(self.module, "unpacked")
        if not self.goal.version:
            return {
                "do": "install",
                "argv": ["sh", path, "--silent", "--tmpdir", folder, "--uninstall"],
                "folder": folder,
                "unload": False,  # the removal takes the driver out of the kernel itself, as far as that goes
            }
        goal, state = self.goal, driver_state()
        argv = installer_argv(path, goal.flavour, goal.dkms, self.options, folder, state)
        beside = not state["loaded"] or BESIDE in argv
        return {"do": "install", "argv": argv, "folder": folder, "unload": not beside}


def stored(module: AnsibleModule, version: str) -> Optional[str]:
    """The kept installer of this version, if it still is what was kept."""
    folder = state_path(module, STORE)
    entry = (read_json(os.path.join(folder, MANIFEST), {}) or {}).get(version)
    path = os.path.join(folder, entry["file"]) if entry else ""
    return path if path and os.path.isfile(path) and sha256(path) == entry["sha256"] else None


def failure(done: Dict[str, Any]) -> str:
    if done["timed_out"]:
        return "the installer did not end within its deadline; the last it said: %s" % done["out"].strip()[-300:]
    lines = re.findall(r"^\S* ?(?:-> )?((?:ERROR|FATAL).*)$", done["out"], flags=re.M)
    said = "; ".join(dict.fromkeys(lines[-4:])) or done["out"].strip()[-300:]
    return "the installer ended with %d: %s" % (done["rc"], said)
