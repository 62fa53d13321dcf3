"""The driver of a host in a stack change, however its files came: modules for the next boot, one reboot, what runs."""

from __future__ import annotations

import os
import re
import time
from typing import Any, List, NoReturn, Optional, Tuple

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpuchange_dkms import build_error, can_build
from ansible.module_utils.gpuchange_driver import (
    MODULES,
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
)
from ansible.module_utils.gpuchange_unit import UnitName, host_unit, unit_name, unit_state, wait_for_unit

BOOT_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
DEADLINE_S = 3000.0
RETRIES = 16
NOT_YET = "host answered but has not rebooted yet (boot_id unchanged)"


class DriverWalk:
    """One call of a stack module, in one direction: what all ways to install a driver have in common.

    `driver` is the version that has to be loaded in the end, "" for none at all; None: this change does not touch it.
    """

    works: Tuple[str, ...] = ("build",)
    """Steps whose units change the host."""

    def __init__(self, module: AnsibleModule, driver: Optional[str]) -> None:
        self.module, self.driver = module, driver
        self.generation = int(args_of(module).get("generation", 0))
        self.forward = direction_of(module) == "do"
        self.repaired: List[str] = []
        self.changed = False
        self.refused = ""
        """Why the kernel would not take the module, in modprobe's words."""

    def end(self, state: str, why: str = "", **more: Any) -> NoReturn:
        """Report the host as it is now, and end the module."""
        raise NotImplementedError

    def report(self, state: str, **fields: Any) -> NoReturn:
        """End the module; what every stack step says is added: the driver, the boot, whether something changed."""
        finish(
            self.module,
            state,
            changed=self.changed,
            driver=driver_state(),
            boot_id=boot_id(),
            rebooted=self._boot_before() not in ("", boot_id()),
            repaired=self.repaired,
            **fields,
        )

    # --------------------------------------------------------------------------------------------- the looks

    def look_for_work(self) -> None:
        """Ends the module while a unit of this step runs."""
        running = [step for step in self.works if self._state(step) == "running"]
        if running:
            self.end("running", "the host still works at: %s" % ", ".join(running))

    def look_at_driver(self) -> None:
        """Ends the module when the driver that must be loaded is not."""
        if self.driver is not None and loaded_version() != self.driver:
            waiting = self._boot_before() == boot_id()
            state, why = ("running", NOT_YET) if waiting else ("not_done", "the wanted driver is not loaded")
            self.end(state, why, rebooting=waiting)

    # -------------------------------------------------------------------------------------------- the units

    def _await_other_direction(self) -> None:
        """Turned back in the middle: what the other direction has set going must have ended before this one acts."""
        for name in [name for step in self.works for name in self._others(step)]:
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

    # ----------------------------------------------------------------------------------- module and reboot

    def modules(self) -> None:
        """The driver's modules must lie ready for the kernel that boots next; else no reboot would help."""
        if not self.driver:
            return
        kernel = boot_kernel()
        why, rebooted = boot_problem(self.driver, kernel), self._boot_before() not in ("", boot_id())
        if why and not rebooted and not modules_on_disk(kernel) and can_build(kernel):
            self._build(kernel)
            why = boot_problem(self.driver, kernel)
        if why:
            log = build_error(self.driver)
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
        wanted = self.driver
        if wanted is None or loaded_version() == wanted:
            return
        boot_before = self._boot_before()
        rebooted = bool(boot_before) and boot_before != steady_boot_id(boot_before)
        if self._comes(wanted, 20.0 if rebooted else 0.0):
            return
        if rebooted:
            said = "rebooted once, but the loaded driver is %s, not %s%s; not rebooting again"
            self.end("not_done", said % (loaded_version() or "none", wanted or "none", self._words()))
        if "Key was rejected" in self.refused:
            self.end("not_done", "the kernel refuses driver %s%s; no reboot would help" % (wanted, self._words()))
        self._reboot()

    def _comes(self, wanted: str, patience_s: float) -> bool:
        """Whether the driver gets loaded without a (further) reboot; a host that just booted may still be at it."""
        deadline = time.monotonic() + patience_s
        while loaded_version() != wanted:
            if time.monotonic() >= deadline:
                return self._unload() if not wanted else self._load(wanted)
            time.sleep(0.2)
        return True

    def _load(self, wanted: str) -> bool:
        return not loaded_version() and self._modprobe() and loaded_version() == wanted

    def _unload(self) -> bool:
        for name in reversed(MODULES):
            if os.path.isdir("/sys/module/" + name):
                run(["modprobe", "-r", name])
        return not loaded_version()

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


def steady_boot_id(old: str) -> str:
    """The boot id, if it is well formed and the same in two reads; else the old one: not known to have rebooted."""
    first, second = boot_id(), boot_id()
    return first if first == second and BOOT_ID.fullmatch(first) else old
