"""Automatic upgrades of a host that a change has out of service: kept away until it is back, over reboots too.

By apt's and dnf's own configuration, not by masking units: that would reload systemd, and a reload takes the GPUs away
from containers that run. It holds for the timers, for cron jobs and for upgrades that wait for the shutdown.
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
DNF_FILE = "/etc/dnf/automatic.conf"
DNF_ASIDE = DNF_FILE + ".gpuchange"
DNF_TEXT = """# A change of this host is under way (gpuchange): no automatic upgrades meanwhile; %s is what was here.
[commands]
apply_updates = no
download_updates = no
[base]
excludepkgs = *
"""
RUNNERS = (
    *("apt-daily-upgrade.service", "unattended-upgrades.service"),
    *("dnf-automatic.service", "dnf-automatic-install.service"),
)
WORK = ("activating", "deactivating")  # both are of type oneshot or only wait for the shutdown: "active" is no work


def blocked() -> bool:
    return (not _has_apt() or read_text(BLOCK_FILE) == BLOCK_TEXT) and not _dnf_is_on()


def block() -> bool:
    """Keep automatic upgrades from starting. True if that was news."""
    if blocked():
        return False
    if _has_apt():
        write_atomic(BLOCK_FILE, BLOCK_TEXT, 0o644)
    if _dnf_is_on():
        _block_dnf()
    return True


def _block_dnf() -> None:
    """What is there is set aside, once: a second call, after a crash in between, must not take ours for it."""
    if not os.path.lexists(DNF_ASIDE):
        os.link(DNF_FILE, DNF_ASIDE)
    write_atomic(DNF_FILE, DNF_TEXT % DNF_ASIDE, 0o644)


def give_back() -> bool:
    """Undo `block`; True if there was anything to undo. Safe to run twice."""
    there = [path for path in (BLOCK_FILE, DNF_ASIDE) if os.path.lexists(path)]
    if BLOCK_FILE in there:
        os.unlink(BLOCK_FILE)
    if DNF_ASIDE in there:
        os.rename(DNF_ASIDE, DNF_FILE)
        _forget_second_name()
    return bool(there)


def _forget_second_name() -> None:
    """rename does nothing where both names are one file: a crash between link and write leaves that."""
    if os.path.lexists(DNF_ASIDE):
        os.unlink(DNF_ASIDE)


def running() -> List[str]:
    """Automatic upgrades that are at work now; breaking one off would leave dpkg half-done."""
    if not os.path.isdir("/run/systemd/system"):
        return []
    states = [(unit, run(["systemctl", "is-active", unit])[1].strip()) for unit in RUNNERS]
    return [unit for unit, state in states if state in WORK]


def _dnf_is_on() -> bool:
    return os.path.isfile(DNF_FILE) and read_text(DNF_FILE) != DNF_TEXT % DNF_ASIDE


def _has_apt() -> bool:
    return os.path.isdir(os.path.dirname(BLOCK_FILE))
