"""Runs one command of a host unit, once, and leaves its result where a reboot or a dead controller cannot lose it.

Copied to the change's state directory and started there by systemd (or detached): standard library only.
Usage: gpuchange_runner.py SPEC.json, with {argv, env, deadline_s, begun, result, log}.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

TAIL = 16 * 1024
LOG_LIMIT = 8 * 1024 * 1024


def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def start_time(pid: int) -> str:
    """Field 22 of /proc/PID/stat: with the pid and the boot it names one process for ever."""
    with open("/proc/%d/stat" % pid, encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()[19]


def utc() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def put(path: str, data: dict[str, Any], once: bool) -> bool:
    """Write JSON atomically and synced; `once`: False if the file was there already."""
    folder = os.path.dirname(path)
    descriptor, temporary = tempfile.mkstemp(prefix=".", suffix=".new", dir=folder)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(data, file, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(temporary, path) if once else os.rename(temporary, path)
    except FileExistsError:
        return False
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    folder_descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(folder_descriptor)
    os.close(folder_descriptor)
    return True


class Tail:
    """The last bytes of the output, and a bounded log; a full disk costs us the log, never the command."""

    def __init__(self, log: str) -> None:
        self.kept = b""
        self.room = LOG_LIMIT
        try:
            self.log: Any = open(log, "ab", buffering=0)  # noqa: SIM115
        except OSError:
            self.log = None

    def add(self, data: bytes) -> None:
        self.kept = (self.kept + data)[-TAIL:]
        if self.log and self.room > 0:
            self.room -= len(data)
            with contextlib.suppress(OSError):
                self.log.write(data)


def follow(process: subprocess.Popen[bytes], tail: Tail, deadline_s: float) -> bool:
    """Read the output until the command ends. False when the deadline ended it.

    The end of the *command* counts, not the end of its output: a daemon that it left behind may hold the pipe open.
    """
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    selector = selectors.DefaultSelector()
    selector.register(process.stdout, selectors.EVENT_READ)
    end = time.monotonic() + deadline_s
    in_time = True
    while process.poll() is None and in_time:
        if selector.get_map() and selector.select(timeout=0.2) and not take(process, tail):
            selector.unregister(process.stdout)
        if not selector.get_map():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
        in_time = time.monotonic() <= end
    if process.poll() is None:
        stop(process)
    take(process, tail)
    return in_time


def take(process: subprocess.Popen[bytes], tail: Tail) -> bool:
    """Move what can be read now into the tail. False at the end of the output."""
    assert process.stdout is not None
    with contextlib.suppress(BlockingIOError):
        while True:
            data = os.read(process.stdout.fileno(), 65536)
            if not data:
                return False
            tail.add(data)
    return True


def stop(process: subprocess.Popen[bytes]) -> None:
    for sign, patience in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
            return


def main(path: str) -> int:
    # A shutdown in the middle of dpkg is worse than a slow shutdown: the command may end, systemd bounds the wait.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with open(path, encoding="utf-8") as file:
        spec = json.load(file)
    begun = {"pid": os.getpid(), "start_time": start_time(os.getpid()), "boot_id": boot_id(), "started": utc()}
    if not put(spec["begun"], begun, once=True):
        return 0
    tail = Tail(spec["log"])
    in_time, rc = True, 127
    try:
        process = subprocess.Popen(
            spec["argv"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=spec["env"],
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL),
        )
    except OSError as error:
        tail.add(("%s: %s\n" % (spec["argv"][0], error.strerror)).encode())
    else:
        in_time = follow(process, tail, spec["deadline_s"])
        rc = process.wait() if in_time else 124
    result = {
        "rc": rc,
        "timed_out": not in_time,
        "boot_id": boot_id(),
        "started_boot": begun["boot_id"],
        "started": begun["started"],
        "ended": utc(),
        "out": tail.kept.decode("utf-8", "replace"),
    }
    put(spec["result"], result, once=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
