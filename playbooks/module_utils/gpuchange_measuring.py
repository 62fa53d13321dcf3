"""Ends a measuring unit before its time: a host that goes back must not serve, or be judged, under our own load."""

from __future__ import annotations

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpuchange_host import change_of, state_path, write_atomic
from ansible.module_utils.gpuchange_unit import UnitName, named, unit_state, wait_for_unit

STEP = "measure"
RANK = "rank"  # begins the step of a test between hosts
PHASES = ("baseline", "verify")
WAIT_S = 20.0


def stop_path(module: AnsibleModule, phase: str) -> str:
    """The file that tells the unit of `phase` to end."""
    return state_path(module, "%s-%s.stop" % (phase, STEP))


def end_measuring(module: AnsibleModule) -> str:
    """Tell this change's measuring units to end and wait for them a while; the unit that still works, or "".

    Call it inside `owned(module)`.
    """
    names = {phase: UnitName(change_of(module), phase, "do", STEP) for phase in PHASES}
    stops = {name: stop_path(module, phase) for phase, name in names.items()}
    stops.update({name: name.file("stop") for name in named(change_of(module), RANK)})
    running = [name for name in stops if unit_state(name)["state"] == "running"]
    for name in running:
        write_atomic(stops[name], "")
    for name in running:
        if wait_for_unit(name, WAIT_S / len(running))["state"] == "running":
            return name.unit
    return ""
