"""Processes of plays that are forked from the engine instead of started afresh: a tenth of the time, else the same.

Same child code, same pipes, own session, own environment, also as /proc tells it: that is how orphans are found.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import Any

from gpuchange import playchild

PAD = "GPUCHANGE_ATTEMPT=" + "x" * 200
"""The server is started with it: the room in which a fork writes its own attempt."""


class Forked:
    """The part of subprocess.Popen that a play uses."""

    def __init__(self, _argv: Any, *, env: dict[str, str], cwd: Path, stderr: Any, **_: Any) -> None:
        order, answer = os.pipe(), os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            become_play(order[0], answer[1], stderr.fileno(), env, cwd)
        os.close(order[0])
        os.close(answer[1])
        self.stdin, self.stdout = os.fdopen(order[1], "wb"), os.fdopen(answer[0], "rb")

    def wait(self) -> int:
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def become_play(order: int, answer: int, log: int, environment: dict[str, str], directory: Path) -> None:
    """Never returns."""
    code = 1
    try:
        os.setsid()
        os.chdir(directory)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        for standard, handle in enumerate((order, answer, log)):
            os.dup2(handle, standard)
        os.closerange(3, 200)
        os.environ.clear()
        os.environ.update(environment)
        show_attempt(environment["GPUCHANGE_ATTEMPT"])
        sys.stdin, sys.stdout, sys.stderr = (open(n, mode, closefd=False) for n, mode in enumerate("rww"))  # noqa: SIM115
        playchild.main()
        code = 0
    finally:
        os._exit(code)


def show_attempt(attempt: str) -> None:
    """Write the attempt over PAD in this process's environment as the kernel shows it."""
    start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47])
    place = Path("/proc/self/environ").read_bytes().index(PAD.encode())
    text = f"GPUCHANGE_ATTEMPT={attempt}".encode()
    ctypes.memmove(start + place, text.ljust(len(PAD), b"\0"), len(PAD))
