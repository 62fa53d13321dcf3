"""What a provider must remember on a host between calls: the state found, clocks, whether it was given back."""

from __future__ import annotations

import os
import time
from typing import Any, Dict

from ansible.module_utils.gpuchange_host import boot_id, read_json, write_atomic


class Notes:
    """A JSON file in the change's state directory; every change of it is on disk before it is acted upon."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.data: Dict[str, Any] = read_json(path, {}) or {}

    @property
    def ours(self) -> bool:
        """Whether this change has acted and not yet given back what it found."""
        return bool(self.data) and not self.data.get("released")

    def begin(self, **found: Any) -> None:
        """Keep the state found; only before the first action, since a later call would find our own doing."""
        self.data = {}
        self.save(clocks={}, released=False, **found)

    def save(self, **changes: Any) -> None:
        self.data.update(changes)
        os.makedirs(os.path.dirname(self.path), mode=0o700, exist_ok=True)
        write_atomic(self.path, self.data)

    def clock(self, name: str) -> float:
        """Seconds since `name` was first asked for, by this machine's own clock; a reboot starts it again."""
        clocks, now, boot = dict(self.data.get("clocks") or {}), time.monotonic(), boot_id()
        begun = clocks.get(name)
        if not begun or begun["boot_id"] != boot:
            begun = {"at": now, "boot_id": boot}
            self.save(clocks=dict(clocks, **{name: begun}))
        return now - float(begun["at"])

    def forget_clock(self, name: str) -> None:
        clocks = dict(self.data.get("clocks") or {})
        if clocks.pop(name, None):
            self.save(clocks=clocks)
