"""The steps of a stack change on a host: transaction as a unit, module check, reboot. Looks first, acts if needed."""

from __future__ import annotations

import os
import re
import sys
import time
from typing import Any, Dict, List, NoReturn, Optional

from ansible.module_utils import gpuchange_apt_unit, gpuchange_dpkg_lock
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpuchange_apt_private import Move
from ansible.module_utils.gpuchange_dkms import build_error, can_build
from ansible.module_utils.gpuchange_driver import (
    boot_kernel,
    boot_problem,
    driver_state,
    loaded_version,
    modules_on_disk,
)
from ansible.module_utils.gpuchange_host import (
    args_of,
    boot_id,
    change_of,
    direction_of,
    finish,
    phase_of,
    read_json,
    run,
    save_once,
    write_atomic,
)
from ansible.module_utils.gpuchange_packages import alternatives, audit, installed, marks
from ansible.module_utils.gpuchange_store import Store
from ansible.module_utils.gpuchange_unit import (
    UnitName,
    host_unit,
    install_script,
    unit_name,
    unit_state,
    wait_for_unit,
)

Rows = Dict[str, Dict[str, str]]
BEFORE = "stack-before.json"
BOOT_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
QUIET = {
    "DEBIAN_FRONTEND": "noninteractive",
    "DEBCONF_NONINTERACTIVE_SEEN": "true",
    "NEEDRESTART_SUSPEND": "1",
    "NEEDRESTART_MODE": "l",
    "APT_LISTCHANGES_FRONTEND": "none",
    "UCF_FORCE_CONFFOLD": "1",
}
DEADLINE_S = 3000.0
RETRIES = 16
STEPS = ("install", "complete", "repair")
WORKS = (*STEPS, "build")
NOT_YET = "host answered but has not rebooted yet (boot_id unchanged)"


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


class Walk:
    """One call of the module, in one direction."""

    def __init__(self, module: AnsibleModule, target: Target, before: Dict[str, Any]) -> None:
        self.module, self.target, self.before = module, target, before
        self.generation = int(args_of(module).get("generation", 0))
        self.forward = direction_of(module) == "do"
        self.repaired: List[str] = []
        self.changed = False
        self.refused = ""
        """Why the kernel would not take the module, in modprobe's words."""

    # -------------------------------------------------------------------------------------------- the end

    def end(self, state: str, why: str = "", **more: Any) -> NoReturn:
        rows = installed()
        found = {name: rows[name]["version"] for name in self.target.touched if name in rows}
        finish(
            self.module,
            state,
            why=why,
            changed=self.changed,
            installed=found,
            driver=driver_state(),
            boot_id=boot_id(),
            rebooted=self._boot_before() not in ("", boot_id()),
            left=len(self.target.remaining(rows)),
            repaired=self.repaired,
            holds=marks("showhold"),
            alternatives=alternatives(),
            **more,
        )

    def look(self) -> NoReturn:
        """Answer a probe from the real state: does something run, is everything as this direction wants it?"""
        running = [step for step in WORKS if self._state(step) == "running"]
        if running:
            self.end("running", "the host still works at: %s" % ", ".join(running))
        left = self.target.remaining()
        if left:
            self.end("not_done", "%d packages are not yet as wanted" % len(left))
        if self.target.driver and loaded_version() != self.target.driver:
            waiting = self._boot_before() == boot_id()
            state, why = ("running", NOT_YET) if waiting else ("not_done", "the wanted driver is not loaded")
            self.end(state, why, rebooting=waiting)
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

    def _await_other_direction(self) -> None:
        """Turned back in the middle: what the other direction has set going must have ended before this one acts."""
        for name in [name for step in WORKS for name in self._others(step)]:
            if unit_state(name)["state"] == "running" and wait_for_unit(name, 30.0)["state"] == "running":
                self.end("running", "the transaction of the other direction still runs (%s)" % name.unit)
        for reboot in self._others("reboot"):
            ordered = read_json(reboot.file("from"), {}) or {}
            if ordered.get("boot_id") == boot_id() and unit_state(reboot).get("rc", 0) == 0:
                self.end("running", NOT_YET, rebooting=True)

    def _others(self, step: str) -> List[UnitName]:
        """The units that the other direction has ordered for `step`, an operator's retries included."""
        direction, change, phase = "undo" if self.forward else "do", change_of(self.module), phase_of(self.module)
        names = [UnitName(change, phase, direction, step, number) for number in range(RETRIES)]
        return [name for name in names if os.path.exists(name.file("spec"))]

    def _state(self, step: str) -> str:
        return str(unit_state(unit_name(self.module, step, self.generation))["state"])

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

    # ----------------------------------------------------------------------------------- module and reboot

    def modules(self) -> None:
        """The driver's modules must lie ready for the kernel that boots next; else no reboot would help."""
        if not self.target.driver:
            return
        kernel = boot_kernel()
        why, rebooted = boot_problem(self.target.driver, kernel), self._boot_before() not in ("", boot_id())
        if why and not rebooted and not modules_on_disk(kernel) and can_build(kernel):
            self._build(kernel)
            why = boot_problem(self.target.driver, kernel)
        if why:
            log = build_error(self.target.driver)
            why += " (%s)" % log if log else ""
            said = "rebooted, but %s; reboot will not fix this" if rebooted else "%s; a reboot would not fix this"
            self.end("not_done", said % why)

    def _build(self, kernel: str) -> None:
        """Packages have DKMS build for the running kernel and for the newest; the next boot's may be neither."""
        argv = ["dkms", "autoinstall", "-k", kernel]
        done = host_unit(self.module, "build", argv, 30.0, DEADLINE_S, generation=self.generation)
        self.changed = True
        if done["state"] == "running":
            self.end("running", "dkms builds for kernel %s, which boots next (%s)" % (kernel, done["unit"]))

    def loaded(self) -> None:
        """The wanted driver must be the loaded one; reboots at most once to get there."""
        wanted = self.target.driver
        if not wanted or loaded_version() == wanted:
            return
        boot_before = self._boot_before()
        rebooted = bool(boot_before) and boot_before != steady_boot_id(boot_before)
        if self._comes(wanted, 20.0 if rebooted else 0.0):
            return
        if rebooted:
            said = "rebooted once, but the loaded driver is %s, not %s%s; not rebooting again"
            self.end("not_done", said % (loaded_version() or "none", wanted, self._words()))
        if "Key was rejected" in self.refused:
            self.end("not_done", "the kernel refuses driver %s%s; no reboot would help" % (wanted, self._words()))
        self._reboot()

    def _comes(self, wanted: str, patience_s: float) -> bool:
        """Whether the driver gets loaded without a (further) reboot; a host that just booted may still be at it."""
        deadline = time.monotonic() + patience_s
        while loaded_version() != wanted:
            if time.monotonic() >= deadline:
                return not loaded_version() and self._modprobe() and loaded_version() == wanted
            time.sleep(0.2)
        return True

    def _modprobe(self) -> bool:
        rc, _, err = run(["modprobe", "nvidia"])
        self.refused = err.strip()[-300:] if rc else ""
        return rc == 0

    def _words(self) -> str:
        secure = "; Secure Boot is on and the module's signing key is not enrolled" if "Key was" in self.refused else ""
        return " (%s%s)" % (self.refused, secure) if self.refused else ""

    def _boot_file(self) -> str:
        name = unit_name(self.module, "reboot", self.generation)
        return name.file("from")

    def _boot_before(self) -> str:
        """The boot in which this step asked for a reboot; "" when it did not."""
        return str((read_json(self._boot_file(), {}) or {}).get("boot_id", ""))

    def _reboot(self) -> NoReturn:
        save_once(self._boot_file(), {"boot_id": boot_id()})
        self.changed = True
        # The answer must be on its way before the network goes down.
        argv = ["sh", "-c", "sleep 1; systemctl reboot || reboot"]
        done = host_unit(self.module, "reboot", argv, wait_s=0.0, deadline_s=60, generation=self.generation)
        if done["state"] == "finished" and done["rc"]:
            self.end("not_done", "the reboot was refused: %s" % done["out"].strip()[-300:])
        if done["state"] == "lost":
            run(["systemctl", "reboot"])  # still the same boot: the order was lost, not carried out
        self.end("running", NOT_YET, rebooting=True)


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


def steady_boot_id(old: str) -> str:
    """The boot id, if it is well formed and the same in two reads; else the old one: not known to have rebooted."""
    first, second = boot_id(), boot_id()
    return first if first == second and BOOT_ID.fullmatch(first) else old
