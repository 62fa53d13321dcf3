"""Automatic upgrades of a host that a change has out of service: kept away until it is back, over reboots too.

By apt's own configuration, not by masking units: that would reload systemd, and a reload takes the GPUs away from
containers that run. It holds for the timers, for cron jobs and for upgrades that wait for the shutdown.
"""

from __future__ import annotations

import os
from typing import List

from ansible.module_utils.gpuchange_host import read_text, run, write_atomic

BLOCK_FILE = "/etc/apt/apt.conf.d/zz-gpuchange"
BLOCK_TEXT = """// A change of this host is under way (gpuchange): no automatic upgrades meanwhile.
APT::Periodic::Enable "0";
Unattended-Upgrade::InstallOnShutdown "false";
Unattended-Upgrade::Package-Blacklist { ".*"; };
"""
RUNNERS = ("apt-daily-upgrade.service", "unattended-upgrades.service")
WORK = ("activating", "deactivating")  # both are of type oneshot or only wait for the shutdown: "active" is no work


def blocked() -> bool:
    return not _has_apt() or read_text(BLOCK_FILE) == BLOCK_TEXT


def block() -> bool:
    """Keep automatic upgrades from starting. True if that was news."""
    if blocked():
        return False
    write_atomic(BLOCK_FILE, BLOCK_TEXT, 0o644)
    return True


def give_back() -> bool:
    """Undo `block`; True if there was anything to undo. Safe to run twice."""
    if not os.path.lexists(BLOCK_FILE):
        return False
    os.unlink(BLOCK_FILE)
    return True


def running() -> List[str]:
    """Automatic upgrades that are at work now; breaking one off would leave dpkg half-done."""
    if not os.path.isdir("/run/systemd/system"):
        return []
    states = [(unit, run(["systemctl", "is-active", unit])[1].strip()) for unit in RUNNERS]
    return [unit for unit, state in states if state in WORK]


def _has_apt() -> bool:
    return os.path.isdir(os.path.dirname(BLOCK_FILE))
