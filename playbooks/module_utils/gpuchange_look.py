"""Bounded looks at a host: every read has a size limit, every command a deadline. Nothing here changes anything."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from typing import IO, Any, Dict, List, Optional

LIMIT = 64 * 1024
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ENVIRONMENT = {"PATH": PATH, "LC_ALL": "C.UTF-8", "LANG": "C.UTF-8", "HOME": "/root"}


def read_bytes(path: str, limit: int = LIMIT) -> bytes:
    """At most `limit` bytes of a regular or virtual file; empty when it cannot be read. Never blocks on a FIFO."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        chunks = []
        left = limit
        while left > 0:
            chunk = os.read(handle, left)
            if not chunk:
                break
            chunks.append(chunk)
            left -= len(chunk)
        return b"".join(chunks)
    except OSError:
        return b""
    finally:
        os.close(handle)


def read_text(path: str, limit: int = LIMIT) -> str:
    return read_bytes(path, limit).decode("utf-8", "replace")


def link_hops(path: str, most: int = 16) -> List[str]:
    """Every hop of a link, the path itself first: /usr/local/cuda, /etc/alternatives/cuda, /usr/local/cuda-12.4."""
    hops = [path]
    while len(hops) < most and os.path.islink(hops[-1]):
        hops.append(os.path.normpath(os.path.join(os.path.dirname(hops[-1]), os.readlink(hops[-1]))))
    return hops


class _Taker(threading.Thread):
    """Drains one pipe and keeps its first `limit` bytes, so that a talkative command neither blocks nor grows us."""

    def __init__(self, pipe: IO[bytes], limit: int) -> None:
        super().__init__(daemon=True)
        self.pipe, self.limit, self.kept, self.cut = pipe, limit, bytearray(), False
        self.start()

    def run(self) -> None:
        for chunk in iter(lambda: self.pipe.read1(65536), b""):  # type: ignore[attr-defined]
            room = self.limit - len(self.kept)
            self.kept += chunk[:room]
            self.cut = self.cut or len(chunk) > room

    def text(self) -> str:
        self.join(0.5)
        return bytes(self.kept).decode("utf-8", "replace")


def run(argv: List[str], deadline_s: float = 10.0, limit: int = LIMIT) -> Dict[str, Any]:
    """What a command said: {rc, out, err, hung, cut, seconds, path}. `rc` is None when it is not installed or hung.

    A command stuck in the kernel cannot be killed: it is left behind and reported, never waited for.
    """
    found = shutil.which(argv[0], path=PATH)
    if found is None:
        return _said(None, "", "%s: not installed" % argv[0], path="")
    began = time.monotonic()
    try:
        child = subprocess.Popen(
            [found, *argv[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=ENVIRONMENT,
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:
        return _said(None, "", "%s: %s" % (found, error.strerror), path=found)
    assert child.stdout is not None and child.stderr is not None
    out, err = _Taker(child.stdout, limit), _Taker(child.stderr, limit)
    rc = _wait(child, deadline_s)
    return _said(rc, out.text(), err.text(), path=found, hung=rc is None, cut=out.cut, seconds=time.monotonic() - began)


def _wait(child: "subprocess.Popen[bytes]", deadline_s: float) -> Optional[int]:
    try:
        return child.wait(deadline_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL)
        return None


def _said(
    rc: Optional[int], out: str, err: str, path: str, hung: bool = False, cut: bool = False, seconds: float = 0.0
) -> Dict[str, Any]:
    return {
        "rc": rc,
        "out": out,
        "err": err[-4096:],
        "hung": hung,
        "cut": cut,
        "seconds": round(seconds, 3),
        "path": path,
    }
