"""The steps of a stack change by dnf on a host: transaction as a unit, module check, reboot. Looks first."""

from __future__ import annotations

import os
from typing import Any, Dict, List, NoReturn, Tuple

from ansible.module_utils import gpuchange_dnf_unit
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpuchange_dnf_call import answer_of, ask, interpreter
from ansible.module_utils.gpuchange_driver import loaded_version
from ansible.module_utils.gpuchange_driver_walk import DEADLINE_S, DriverWalk
from ansible.module_utils.gpuchange_host import args_of, boot_id, change_of, read_json, state_path, write_atomic
from ansible.module_utils.gpuchange_rpm import LOCKS, installed, lock_text, locks_moved, working
from ansible.module_utils.gpuchange_stack import Target
from ansible.module_utils.gpuchange_unit import host_unit, install_script, unit_name

BEFORE = "dnf-before.json"
STEPS = ("install", "complete")


def look_before() -> Dict[str, Any]:
    """What a rollback leads back to, saved before the first action."""
    return {
        "versions": {key: row["version"] for key, row in installed().items()},
        "auto": ask({"do": "marked"}).get("auto", []),
        "locks": lock_text(),
        "driver": loaded_version(),
        "boot_id": boot_id(),
    }


class DnfWalk(DriverWalk):
    """One call of the module, in one direction."""

    works = (*STEPS, "build")

    def __init__(self, module: AnsibleModule, target: Target, before: Dict[str, Any]) -> None:
        super().__init__(module, target.driver or None)
        self.target, self.before = target, before

    def end(self, state: str, why: str = "", **more: Any) -> NoReturn:
        rows = installed()
        found = {name: rows[name]["version"] for name in self.target.touched if name in rows}
        left = len(self.target.remaining(rows))
        self.report(state, why=why, installed=found, left=left, holds=lock_text().splitlines(), **more)

    def look(self) -> NoReturn:
        """Answer a probe from the real state: does something run, is everything as this direction wants it?"""
        self.look_for_work()
        left = self.target.remaining(installed())
        if left or self.broken_off():
            self.end("not_done", "%d packages are not yet as wanted" % len(left))
        self.look_at_driver()
        self.end("done")

    def broken_off(self) -> bool:
        return self._state("install") == "lost" and self._state("complete") != "finished"

    # --------------------------------------------------------------------------------------- the packages

    def packages(self) -> None:
        """Bring the packages to the target by one transaction; ends the module while it runs or when it failed."""
        self._await_other_direction()
        for step in STEPS:
            if self._state(step) == "running":
                self._unit(step)
        if self.target.remaining(installed()) or self.broken_off():
            step = "install" if self._state("install") != "lost" else "complete"
            if step == "complete" and self._state(step) == "lost":
                self.end("unknown", "the package transaction was broken off twice; look at dnf history on the host")
            self._unit(step)
            left = self.target.remaining(installed())
            if left:
                said = ["%s is %s, not %s" % (m["name"], m["from"] or "absent", m["to"] or "absent") for m in left]
                self.end("not_done", "the transaction ended, but %s" % ", ".join(said)[:600])
        if self._state("complete") != "absent":
            self.repaired.append("previous attempt was interrupted inside rpm; the transaction was completed")
        self._set_locks()

    def _set_locks(self) -> None:
        """Version locks of what moved are at its new version; going back, the list is what it was."""
        now = lock_text()
        wanted = locks_moved(now, self.target.install) if self.forward else self.before["locks"]
        if wanted != now:
            write_atomic(LOCKS, wanted, 0o644)
            self.changed = True

    def _unit(self, step: str) -> None:
        """Start or attend one transaction unit; returns when it has ended well, ends the module otherwise."""
        job = unit_name(self.module, step, self.generation).file("job")
        if self._state(step) == "absent":
            self._await_others()
            write_atomic(job, self._job())
        argv = [interpreter(), "-I", install_script(self.module, gpuchange_dnf_unit), job]
        deadline = float(args_of(self.module).get("deadline_s") or DEADLINE_S)
        done = host_unit(self.module, step, argv, 30.0, deadline, generation=self.generation)
        self.changed = True
        if done["state"] == "running":
            said = "dnf step of change %s still active on this host since %s (%s); not starting another"
            self.end("running", said % (change_of(self.module), done.get("started", "now"), done["unit"]))
        if done["state"] == "lost":
            self.end("running", "%s was interrupted; looking at what it left" % done["unit"])
        if done["rc"]:
            why = "it did not end within its deadline" if done["timed_out"] else answer_of(done["out"])["error"]
            self.end("not_done", "dnf's transaction failed: %s" % why, log=done["out"][-6000:])

    def _await_others(self) -> None:
        busy = working()
        if busy:
            said = "another package operation is active on this host: %s; not starting another"
            self.end("running", said % busy, blocked=True)

    def _job(self) -> Dict[str, Any]:
        paths, missing = stored(self.module, self.target.install)
        if missing:
            self.end("not_done", "not in the package store of this change: %s" % ", ".join(missing))
        versions = self.before["versions"]
        mains = set((args_of(self.module).get("transaction") or {}).get("mains", {}).values())
        new = [name for name in self.target.install if name not in versions and name not in mains]
        return {
            "do": "transact",
            "install": self.target.install,
            "remove": self.target.remove,
            "auto": sorted(set(self.before["auto"]) | set(new)),
            "files": paths,
            "cache": state_path(self.module, "dnf-cache"),
        }


def stored(module: AnsibleModule, packages: Dict[str, str]) -> Tuple[List[str], List[str]]:
    """(files, missing) of {name: version} in this change's store; a file of another size counts as missing."""
    folder = state_path(module, "rpms")
    files = (read_json(os.path.join(folder, "manifest.json"), {}) or {}).get("files", {})
    found, missing = [], []
    for name, version in sorted(packages.items()):
        entry = files.get("%s=%s" % (name, version))
        path = os.path.join(folder, entry["file"]) if entry else ""
        if path and os.path.exists(path) and os.path.getsize(path) == entry["size"]:
            found.append(path)
        else:
            missing.append("%s %s" % (name, version))
    return found, missing
