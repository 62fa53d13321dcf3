"""Mount a folder of this machine inside a running guest: `python -m gpuchange.lab.carry PID FOLDER TARGET`.

A process of its own, because it enters the mount namespace of the guest's init (PID) and does not come back.
"""

from __future__ import annotations

import ctypes
import os
import sys

# these two numbers are the same on every architecture
SYS_OPEN_TREE, SYS_MOVE_MOUNT = 428, 429
AT_FDCWD = -100
OPEN_TREE_CLONE = 1
MOVE_MOUNT_F_EMPTY_PATH = 4
CLONE_NEWNS = 0x20000


def carry(pid: int, folder: str, target: str) -> None:
    """Raises OSError when the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    tree = libc.syscall(SYS_OPEN_TREE, AT_FDCWD, folder.encode(), OPEN_TREE_CLONE)
    _check(tree, folder)
    namespace = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)
    _check(libc.setns(namespace, CLONE_NEWNS), f"mount namespace of {pid}")
    moved = libc.syscall(SYS_MOVE_MOUNT, tree, b"", AT_FDCWD, target.encode(), MOVE_MOUNT_F_EMPTY_PATH)
    _check(moved, target)


def _check(result: int, what: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), what)


if __name__ == "__main__":
    carry(int(sys.argv[1]), sys.argv[2], sys.argv[3])
