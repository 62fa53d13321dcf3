"""Does the fabric manager work where there are NVSwitches? Where there are none it does not matter. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuchange.checks.snapshot import Snapshot, mapping

NOT_NEEDED = "no NVSwitch on this host: fabric manager not required"


def troubles(facts: Mapping[str, Any], picture: Snapshot) -> list[str]:
    """Why hosts with NVSwitches must not serve: the service does not run; its own last words say more."""
    said = mapping(facts.get("fabric_manager"))
    state = str(said.get("active") or "")
    if not picture.switches or state in ("", "active"):
        return []
    words = f": {said.get('words')}" if said.get("words") else ""
    return [f"NVSwitch present, but nvidia-fabricmanager.service is {state}{words}"]


def superfluous(facts: Mapping[str, Any], picture: Snapshot) -> str:
    """What to know of a fabric manager on a host without NVSwitches; "" where there is none or it is needed."""
    if picture.switches or not picture.fabric_manager:
        return ""
    failed = mapping(facts.get("fabric_manager")).get("active") == "failed"
    return NOT_NEEDED + ("; that its service has failed means nothing" if failed else "")
