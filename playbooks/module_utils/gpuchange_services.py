"""systemd services of a host: what state they are in, stopping and starting them without waiting."""

from __future__ import annotations

from typing import Any, Dict, List

from ansible.module_utils.gpuchange_host import run

PROPERTIES = (
    "Id",
    "LoadState",
    "ActiveState",
    "SubState",
    "UnitFileState",
    "MainPID",
    "Result",
    "ExecMainStatus",
    "NRestarts",
)
MOVING = ("activating", "deactivating", "reloading")


def states(units: List[str]) -> Dict[str, Dict[str, str]]:
    """{unit as asked: {load, active, sub, enabled, pid, result, status, restarts}}; RuntimeError without systemd."""
    return {unit: _state(unit) for unit in units}


def _state(unit: str) -> Dict[str, str]:
    rc, out, err = run(["systemctl", "show", "--property=" + ",".join(PROPERTIES), "--", unit])
    if rc != 0:
        raise RuntimeError("systemctl cannot tell about %s: %s" % (unit, (err or out).strip() or "rc %d" % rc))
    shown = dict(line.partition("=")[::2] for line in out.splitlines())
    return {
        "load": shown.get("LoadState", ""),
        "active": shown.get("ActiveState", ""),
        "sub": shown.get("SubState", ""),
        "enabled": shown.get("UnitFileState", ""),
        "pid": shown.get("MainPID", ""),
        "result": shown.get("Result", ""),
        "status": shown.get("ExecMainStatus", ""),
        "restarts": shown.get("NRestarts", "0"),
    }


def missing(found: Dict[str, Dict[str, str]]) -> List[str]:
    return sorted(unit for unit, state in found.items() if state["load"] != "loaded")


def order(verb: str, units: List[str]) -> str:
    """Ask systemd to start or stop; "" or why it refused. Does not wait: a stop may take as long as the unit allows."""
    rc, out, err = run(["systemctl", verb, "--no-block", "--", *units])
    return "" if rc == 0 else (err or out).strip() or "systemctl %s ended with %d" % (verb, rc)


def is_running(state: Dict[str, Any]) -> bool:
    """Active, or a oneshot that is: what must be started again later."""
    return state["active"] in ("active", "reloading", "activating")


def last_words(unit: str, lines: int = 5) -> str:
    """The end of the unit's journal on one line; "" when there is none."""
    rc, out, _ = run(["journalctl", "-u", unit, "-n", str(lines), "-o", "cat", "--no-pager", "-q"])
    return " | ".join(out.split("\n")).strip(" |") if rc == 0 else ""
