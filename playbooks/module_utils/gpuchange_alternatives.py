"""Alternatives of a host: giving each the mode and value that it should have."""

from __future__ import annotations

from typing import Any, Dict, List

from ansible.module_utils.gpuchange_host import run
from ansible.module_utils.gpuchange_packages import alternatives


def set_alternatives(wanted: Dict[str, Dict[str, str]]) -> List[str]:
    """Give each alternative its mode and value; "any" mode asks for the value only. Returns what could not be done."""
    failed = []
    for name, entry in sorted(wanted.items()):
        for argv in _alternative_commands(name, entry, alternatives().get(name)):
            rc, _, err = run(argv)
            if rc:
                failed.append("%s: %s" % (name, err.strip()[-200:]))
    return failed


def _alternative_commands(name: str, entry: Dict[str, str], now: Any) -> List[List[str]]:
    if now is None or now == entry or (entry["mode"] == "any" and now["value"] == entry["value"]):
        return []
    if entry["mode"] == "auto":
        return [["update-alternatives", "--auto", name]]
    return [["update-alternatives", "--set", name, entry["value"]]]
