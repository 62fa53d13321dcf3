"""Waiting for a condition, never for a while."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def eventually(holds: Callable[[], Any], within: float = 10.0) -> Any:
    """What `holds` answers as soon as that is true; a failed assertion when it does not come within so many seconds."""
    deadline = time.monotonic() + within
    while not (value := holds()):
        assert time.monotonic() < deadline, "did not come true"
        time.sleep(0.02)
    return value
