"""Cards set again as they were recorded: persistence, power limit, MIG mode and devices. Looks, acts if needed."""

from __future__ import annotations

from typing import Any, Dict, Iterator, List

from ansible.module_utils.gpuchange_look import run

QUERY = ("index", "uuid", "persistence_mode", "power.limit", "mig.mode.current")
SWITCHES = (("persistence", "persistence_mode", "-pm"), ("mig_mode", "mig.mode.current", "-mig"))
LOOK_DEADLINE_S = 5.0
SET_DEADLINE_S = 8.0
SAME_W = 0.5


def put_back(goal: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """What was set: [{command, rc, said}]. Stops at the first that fails: what follows may need it.

    goal: [{uuid, persistence, power_limit (W), mig_mode, mig: [PROFILE:START]}]; None or [] leaves a setting alone.
    """
    done: List[Dict[str, Any]] = []
    for step in (modes, instances):  # instances need the mode
        for argv in step(goal):
            said = run(["nvidia-smi", *argv], SET_DEADLINE_S, 4096)
            words = (said["out"] + said["err"]).strip()[-300:]
            done.append({"command": " ".join(["nvidia-smi", *argv]), "rc": said["rc"], "said": words})
            if said["rc"] != 0:
                return done
    return done


def present() -> Dict[str, Dict[str, str]]:
    """{uuid: its settings} of the cards that answer."""
    said = run(["nvidia-smi", "--query-gpu=" + ",".join(QUERY), "--format=csv,noheader,nounits"], LOOK_DEADLINE_S)
    rows = [[cell.strip() for cell in line.split(",")] for line in said["out"].splitlines()]
    return {row[1]: dict(zip(QUERY, row)) for row in rows if len(row) == len(QUERY) and row[1].startswith("GPU-")}


def modes(goal: List[Dict[str, Any]]) -> Iterator[List[str]]:
    cards = present()
    for wanted in goal:
        now = cards.get(wanted["uuid"], {})
        for key, field, option in SWITCHES:
            if {wanted.get(key), now.get(field)} == {"Enabled", "Disabled"}:
                yield ["-i", wanted["uuid"], option, "1" if wanted[key] == "Enabled" else "0"]
        if wanted.get("power_limit") and _differs(now.get("power.limit", ""), wanted["power_limit"]):
            yield ["-i", wanted["uuid"], "-pl", "%g" % wanted["power_limit"]]


def _differs(text: str, watts: float) -> bool:
    try:
        return abs(float(text) - watts) > SAME_W
    except ValueError:
        return False  # the card does not tell: it cannot be set either


def instances(goal: List[Dict[str, Any]]) -> Iterator[List[str]]:
    """MIG devices are made on cards that have none: those that somebody made meanwhile are never touched."""
    cards, taken = present(), _with_devices()
    for wanted in goal:
        now = cards.get(wanted["uuid"])
        if now and wanted.get("mig") and now["mig.mode.current"] == "Enabled" and wanted["uuid"] not in taken:
            yield ["mig", "-i", now["index"], "-cgi", ",".join(wanted["mig"]), "-C"]


def _with_devices() -> List[str]:
    found: List[str] = []
    card = ""
    for line in run(["nvidia-smi", "-L"], LOOK_DEADLINE_S)["out"].splitlines():
        if line.startswith("GPU "):
            card = line.rpartition("(UUID: ")[2].rstrip(")")
        elif line.strip().startswith("MIG "):
            found.append(card)
    return found
