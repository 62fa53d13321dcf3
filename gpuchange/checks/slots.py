"""PCI addresses, in the one spelling that sysfs has."""

from __future__ import annotations

import re

_ADDRESS = re.compile(r"\s*(?:([0-9A-Fa-f]{1,8}):)?([0-9A-Fa-f]{1,2}):([0-9A-Fa-f]{1,2})\.([0-7])\s*")


def bus_id(text: str) -> str:
    """00000000:3B:00.0, 000:3b:00.0 and 0000:3b:00.0 are the same slot; what is no address comes back in lower case."""
    found = _ADDRESS.fullmatch(text)
    if not found:
        return text.strip().lower()
    domain, bus, device, function = (int(part or "0", 16) for part in found.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function}"
