"""One controller at a time: an exclusive flock on the file `lock` in the change's directory."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pwd
import socket
import time
import weakref
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from gpuchange.errors import JournalError, LockedError

LINGERS_S = 5.0
_held: weakref.WeakSet[ControllerLock] = weakref.WeakSet()


class ControllerLock:
    """Held from `take` until `release` or the end of the process, however it ends."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        _held.add(self)

    @classmethod
    def take(cls, directory: Path) -> Self:
        """Raises LockedError naming the holder, JournalError when the file cannot be opened."""
        path = directory / "lock"
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise JournalError(
                "the lock cannot be opened", where=str(path), why=str(error), remedy=f"check access to {directory}"
            ) from None
        if not _got(handle, directory):
            os.close(handle)
            raise _locked(directory)
        with contextlib.suppress(OSError):  # the disk is full: the lock is held all the same, without a label
            os.truncate(handle, 0)
            os.write(handle, json.dumps(_myself()).encode())
        return cls(handle)

    def release(self) -> None:
        if self._handle < 0:
            return
        handle, self._handle = self._handle, -1
        with contextlib.suppress(OSError):
            os.truncate(handle, 0)
        os.close(handle)

    def forget(self) -> None:
        """In a forked child: a child that outlives its controller must not hold the change."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def _got(handle: int, directory: Path) -> bool:
    """Whether the lock is ours now. A killed controller's lives on a moment in a process that it was just starting."""
    deadline = time.monotonic() + LINGERS_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            label = holder(directory)
            ended = label.get("host") == socket.gethostname() and not lives(label)
            if not ended or time.monotonic() > deadline:
                return False
            time.sleep(0.02)


def lives(label: Mapping[str, Any]) -> bool:
    """Whether the process that wrote the label runs on this machine now."""
    if label.get("host") != socket.gethostname() or label.get("boot", boot()) != boot():
        return False
    try:
        os.kill(int(label["pid"]), 0)
    except PermissionError:
        return True
    except (OSError, KeyError, TypeError, ValueError, OverflowError):
        return False
    return True


def holder(directory: Path) -> dict[str, Any]:
    """What the lock file says: {pid, host, since}. Empty when the last controller left in good order.

    A label alone does not prove that its writer lives: a killed controller leaves one behind.
    """
    try:
        label = json.loads((directory / "lock").read_text())
    except (OSError, ValueError):
        return {}
    return label if isinstance(label, dict) else {}


def boot() -> str:
    """Which boot of this machine it is."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def user() -> str:
    """Who runs this process, and as whom."""
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        name = str(os.getuid())
    caller = os.environ.get("SUDO_USER", "")
    return f"{caller} as {name}" if caller and caller != name else name


def _myself() -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "user": user(),
        "boot": boot(),
        "since": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
    }


def _locked(directory: Path) -> LockedError:
    who = holder(directory)
    return LockedError(
        f"another controller works on this change: {_who(who) if who else 'another process'}",
        where=str(directory),
        remedy="wait for it, or watch it with gpuchange status",
    )


def _who(label: dict[str, Any]) -> str:
    pid, host, owner = label.get("pid"), label.get("host"), label.get("user")
    return f"process {pid} of {owner} on {host} (boot {label.get('boot')}) since {label.get('since')}"


def _forget_all() -> None:
    for lock in list(_held):
        lock.forget()


os.register_at_fork(after_in_child=_forget_all)
