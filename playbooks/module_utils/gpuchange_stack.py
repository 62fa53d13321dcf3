"""The steps of a stack change on a host: transaction as a unit, module check, reboot. Looks first, acts if needed."""

from __future__ import annotations

import re
import sys
from typing import Any, Dict, List, NoReturn, Optional

from ansible.module_utils import gpuchange_apt_unit, gpuchange_dpkg_lock
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpuchange_apt_private import Move
from ansible.module_utils.gpuchange_driver import loaded_version
from ansible.module_utils.gpuchange_driver_walk import DEADLINE_S, DriverWalk
from ansible.module_utils.gpuchange_host import args_of, boot_id, change_of, write_atomic
from ansible.module_utils.gpuchange_packages import alternatives, audit, installed, marks
from ansible.module_utils.gpuchange_store import Store
from ansible.module_utils.gpuchange_unit import host_unit, install_script, unit_name

Rows = Dict[str, Dict[str, str]]
BEFORE = "stack-before.json"
QUIET = {
    "DEBIAN_FRONTEND": "noninteractive",
    "DEBCONF_NONINTERACTIVE_SEEN": "true",
    "NEEDRESTART_SUSPEND": "1",
    "NEEDRESTART_MODE": "l",
    "APT_LISTCHANGES_FRONTEND": "none",
    "UCF_FORCE_CONFFOLD": "1",
}
STEPS = ("install", "complete", "repair")


class Target:
    """Where one direction leads: packages at exact versions, packages that must be gone, the driver to be loaded."""

    def __init__(self, install: Dict[str, str], remove: List[str], driver: str, renamed: Dict[str, str]) -> None:
        self.install, self.remove, self.driver, self.renamed = install, remove, driver, renamed

    @classmethod
    def forward(cls, transaction: Dict[str, Any]) -> "Target":
        return cls(transaction["install"], transaction["remove"], transaction["driver"], transaction["renamed"])

    @classmethod
    def back(cls, transaction: Dict[str, Any], before: Dict[str, Any]) -> "Target":
        """Every package of the transaction as it was before it."""
        touched = sorted(set(transaction["install"]) | set(transaction["remove"]))
        versions = before["versions"]
        install = {name: versions[name] for name in touched if name in versions}
        return cls(install, [name for name in touched if name not in versions], before["driver"], {})

    @property
    def touched(self) -> List[str]:
        return sorted(set(self.install) | set(self.remove))

    def remaining(self, rows: Optional[Rows] = None) -> List[Move]:
        """What still differs from the target, half-installed packages included."""
        rows = installed() if rows is None else rows
        moves = []
        for name, version in sorted(self.install.items()):
            row = rows.get(name, {"version": "", "status": ""})
            if row["version"] != version or row["status"] != "installed":
                moves.append({"name": name, "from": row["version"], "to": version})
        gone = [name for name in sorted(self.remove) if name in rows]
        return moves + [{"name": name, "from": rows[name]["version"], "to": ""} for name in gone]


def look_before() -> Dict[str, Any]:
    """What a rollback leads back to, saved before the first action."""
    rows = installed()
    return {
        "versions": {key: row["version"] for key, row in rows.items()},
        "holds": marks("showhold"),
        "auto": marks("showauto"),
        "alternatives": alternatives(),
        "driver": loaded_version(),
        "boot_id": boot_id(),
    }


class Walk(DriverWalk):
    """One call of the module, in one direction."""

    works = (*STEPS, "build")

    def __init__(self, module: AnsibleModule, target: Target, before: Dict[str, Any]) -> None:
        super().__init__(module, target.driver or None)
        self.target, self.before = target, before

    def end(self, state: str, why: str = "", **more: Any) -> NoReturn:
        rows = installed()
        found = {name: rows[name]["version"] for name in self.target.touched if name in rows}
        self.report(
            state,
            why=why,
            installed=found,
            left=len(self.target.remaining(rows)),
            holds=marks("showhold"),
            alternatives=alternatives(),
            **more,
        )

    def look(self) -> NoReturn:
        """Answer a probe from the real state: does something run, is everything as this direction wants it?"""
        self.look_for_work()
        left = self.target.remaining()
        if left:
            self.end("not_done", "%d packages are not yet as wanted" % len(left))
        self.look_at_driver()
        self.end("not_done" if audit() else "done")

    # --------------------------------------------------------------------------------------- the packages

    def packages(self) -> None:
        """Bring the packages to the target by one transaction; ends the module while it runs or when it failed."""
        self._await_other_direction()
        for step in STEPS:
            self._attend(step)
        if self.target.remaining():
            self._transact()
            self._after_transaction()
        elif audit():
            self._unit("repair")
        if self._state("complete") != "absent" or self._state("repair") != "absent":
            self.repaired.append("previous attempt was interrupted inside dpkg; repaired with configure -a")
        self._put_right()
        lacking = self._lacking_holds()
        if lacking:
            self.end("not_done", "the hold on %s is gone and cannot be restored" % ", ".join(lacking))

    def _attend(self, step: str) -> None:
        """Wait for a transaction that runs already, before anything is looked at."""
        if self._state(step) == "running":
            self._unit(step)

    def _transact(self) -> None:
        """The transaction; one that was broken off (power cut) is mended and completed, once."""
        step = "install" if self._state("install") != "lost" else "complete"
        if step == "complete" and self._state(step) == "lost":
            self.end("unknown", "the package transaction was broken off twice; look at dpkg --audit on the host")
        self._unit(step)

    def _after_transaction(self) -> None:
        left = self.target.remaining()
        if left:
            said = ["%s is %s, not %s" % (m["name"], m["from"] or "absent", m["to"] or "absent") for m in left]
            self.end("not_done", "the transaction ended, but %s" % ", ".join(said)[:600])

    def _targets(self) -> List[str]:
        """Files of the store and names to remove, after a last simulation: these packages must move and no others."""
        store = Store(self.module)
        paths, missing = store.paths(self.target.install)
        if missing:
            self.end("not_done", "not in the package store of this change: %s" % ", ".join(missing))
        targets = paths + [move["name"] + "-" for move in self.target.remaining() if not move["to"]]
        moves, why = store.offline().simulate(targets)
        if why and self.forward:
            self.end("not_done", "apt cannot make this change any more: %s" % why)
        drift = sorted({move["name"] for move in moves} - set(self.target.touched))
        if drift:
            self.end("not_done", "the host has moved since preflight: %s would change too" % ", ".join(drift))
        return targets

    def _unit(self, step: str) -> None:
        """Start or attend one transaction unit; returns when it has ended well, ends the module otherwise."""
        job = unit_name(self.module, step, self.generation).file("job")
        if self._state(step) == "absent":
            self._await_others()
            write_atomic(job, self._job([] if step == "repair" else self._targets()))
        script = install_script(self.module, gpuchange_apt_unit)
        done = host_unit(
            self.module,
            step,
            [sys.executable, "-I", script, job],
            wait_s=30.0,
            deadline_s=float(args_of(self.module).get("deadline_s") or DEADLINE_S),
            generation=self.generation,
        )
        self.changed = True
        if done["state"] == "running":
            self.end("running", still_active(change_of(self.module), done), unit=done["unit"])
        if done["state"] == "lost" and step != "repair":
            self.end("running", "%s was interrupted; looking at what it left" % done["unit"])
        self.repaired += re.findall(gpuchange_apt_unit.HOLD_RESTORED % ".+", done.get("out", ""))
        if done["state"] == "finished" and done["rc"]:
            self._put_right()  # a unit that was ended at its deadline did not get to it
            self.end("not_done", failure(done), log=done["out"][-6000:])

    def _await_others(self) -> None:
        """A package operation that is not ours must have ended: a second one next to it would only wait, or fail."""
        holder = gpuchange_dpkg_lock.await_lock(5.0)
        if holder:
            said = "another package operation is active on this host: %s; not starting another"
            self.end("running", said % gpuchange_dpkg_lock.said(holder), blocked=True)

    def _lacking_holds(self) -> List[str]:
        present = set(installed())
        wanted = gpuchange_apt_unit.wanted_holds(self.before["holds"], self.target.renamed, present)
        return sorted((wanted & present) - set(marks("showhold")))

    def _job(self, targets: List[str]) -> Dict[str, Any]:
        versions = self.before["versions"]
        succeeded = set(self.target.renamed.values())
        mains = set((args_of(self.module).get("transaction") or {}).get("mains", {}).values())
        new = [name for name in self.target.install if name not in versions and name not in succeeded | mains]
        return {
            "targets": targets,
            "env": dict(QUIET, **Store(self.module).offline(hooks=True).env) if targets else QUIET,
            "touched": self.target.touched,
            "holds": self.before["holds"],
            "renamed": self.target.renamed,
            "auto": self.before["auto"],
            "new_auto": new,
            "purge": self.target.remove if not self.forward else [],
            "fix_broken": not self.forward,
        }

    def _put_right(self) -> None:
        """What an interrupted unit may have left: holds and marks. Does nothing when all is right."""
        job, lost = self._job([]), [name for name in self._lacking_holds() if name in self.before["holds"]]
        if lost:
            self.repaired.append(gpuchange_apt_unit.HOLD_RESTORED % ", ".join(lost))
        gpuchange_apt_unit.silent = True
        gpuchange_apt_unit.restore_holds(job)
        gpuchange_apt_unit.restore_marks(job)


def still_active(change: str, done: Dict[str, Any]) -> str:
    pid = done.get("pid", 0)
    at = gpuchange_dpkg_lock.at_work(int(pid)) if str(pid).isdigit() else ""
    said = "apt step of change %s still active on this host since %s (%s, pid %s%s); not starting another"
    return said % (change, done.get("started", "now"), done["unit"], pid or "?", ", " + at if at else "")


def failure(done: Dict[str, Any]) -> str:
    if done["timed_out"]:
        return "the transaction did not end within its deadline; the last it said: %s" % done["out"].strip()[-300:]
    lines = [line for line in done["out"].splitlines() if line.startswith(("E: ", "dpkg: error", "Err"))]
    return "apt-get ended with %d: %s" % (done["rc"], "; ".join(lines[:4]) or done["out"].strip()[-300:])
