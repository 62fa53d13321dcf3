"""The fault `disk-full`: /var moves to a file system of its own that has not a byte left.

The pool is shared by all hosts, so it cannot be filled for one of them alone. A tmpfs made outside is mounted
in the running guest, and bound again at every power-on until it is mended.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gpuchange.lab.orders import PACKAGE_PARENT
from gpuchange.lab.tools import sh

if TYPE_CHECKING:
    from gpuchange.lab.host import Host

BALLAST = ".ballast"


def stand_in(host: Host) -> Path:
    """Where the small file system is mounted outside."""
    return host.spec.directory / "var" / host.name


def fill(host: Host) -> None:
    """Give the host a /var with nothing free, contents kept."""
    small = stand_in(host)
    if not os.path.ismount(small):
        used = int(sh(["du", "-sm", host.root / "var"]).split()[0])
        small.mkdir(parents=True, exist_ok=True)
        sh(["mount", "-t", "tmpfs", "-o", f"size={used + 16}m,mode=755", "gpuchange-lab-var", small])
        _copy(host.root / "var", small)
        host.set_binds([f"{small}:/var"])
        leader = host.status()["leader"]
        if leader:
            _carry_in(leader, small)
    _use_up(small)


def free(host: Host) -> None:
    """Put /var back on the host's own disk, with all that was written to it meanwhile."""
    small = stand_in(host)
    if not os.path.ismount(small):
        return
    (small / BALLAST).unlink(missing_ok=True)
    _copy(small, host.root / "var")
    host.set_binds([])
    if host.status()["leader"]:
        host.run(["umount", "--lazy", "/var"])
    discard(small)


def discard(small: Path) -> None:
    if os.path.ismount(small):
        sh(["umount", "--lazy", small])
    if small.exists():
        small.rmdir()


def _copy(source: Path, target: Path) -> None:
    sh(["rsync", "-aHAXS", "--delete", "--one-file-system", f"{source}/", f"{target}/"], timeout=300)


def _use_up(directory: Path) -> None:
    left = os.statvfs(directory)
    sh(["fallocate", "-l", str(max(1, left.f_bavail * left.f_frsize)), directory / BALLAST], check=False)


def _carry_in(leader: int, small: Path) -> None:
    command = [sys.executable, "-m", "gpuchange.lab.carry", str(leader), str(small), "/var"]
    sh(command, env={"PYTHONPATH": PACKAGE_PARENT})
