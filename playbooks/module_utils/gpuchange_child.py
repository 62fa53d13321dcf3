"""Runs a function in a child process with a deadline. Python 3.8, standard library only.

For work that may crash, hang, or sleep uninterruptibly in the kernel: whatever happens to the child, the caller
gets an answer, and the child holds none of the caller's file descriptors, so nobody waits for it by accident.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from typing import Any, Callable, Mapping

KILL_WAIT_S = 3.0
RESULT_LIMIT = 4 << 20

Step = Callable[[str], None]


def in_child(work: Callable[[Step], dict[str, Any]], deadline_s: float, env: Mapping[str, str]) -> dict[str, Any]:
    """What `work(step)` returns, plus {hung: False}; `step(text)` tells what it is about to do.

    A child that died or did not end in time gives {hung, why, step}: hung is True when not even SIGKILL ended it.
    """
    pid, reader = start(work, env)
    try:
        lines, in_time = _collect(reader, time.monotonic() + deadline_s)
    finally:
        os.close(reader)
    return conclude(pid, lines, in_time, deadline_s)


def start(work: Callable[[Step], dict[str, Any]], env: Mapping[str, str]) -> tuple[int, int]:
    """(pid, reader) of a child that runs `work(step)`, for callers that follow several at once.

    The reader gives one JSON object a line: {step}, and at last {result} or {died}; hand them to `conclude`.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _child(work, writer, env)
    os.close(writer)
    return pid, reader


def _child(work: Callable[[Step], dict[str, Any]], writer: int, env: Mapping[str, str]) -> None:
    """Never returns. Leaves the caller's session and descriptors first, before anything can hang."""
    code = 1
    try:
        os.setsid()
        _keep_only(writer)
        for name in [name for name in os.environ if name.startswith("CUDA_")]:
            del os.environ[name]  # CUDA_VISIBLE_DEVICES of a login shell would hide cards
        os.environ.update(env)
        _send(writer, {"result": work(lambda text: _send(writer, {"step": text}))})
        code = 0
    except BaseException as error:  # the child ends here, and says why
        _send(writer, {"died": "%s: %s" % (type(error).__name__, error)})
    finally:
        os._exit(code)


def _keep_only(writer: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in (0, 1, 2, writer):
            try:
                os.close(int(name))
            except OSError:
                continue  # the directory's own descriptor


def _send(writer: int, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode("utf-8") + b"\n"
    while data:
        data = data[os.write(writer, data) :]


def _collect(reader: int, until: float) -> tuple[list[dict[str, Any]], bool]:
    """The child's messages, and whether it closed the pipe in time."""
    data = b""
    while len(data) < RESULT_LIMIT:
        left = until - time.monotonic()
        if left <= 0 or not select.select([reader], [], [], left)[0]:
            return parse(data), False
        block = os.read(reader, 65536)
        if not block:
            return parse(data), True
        data += block
    return parse(data), False


def parse(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in data.split(b"\n")[:-1]]


def conclude(pid: int, lines: list[dict[str, Any]], in_time: bool, deadline_s: float) -> dict[str, Any]:
    """End the child, if it has not ended in time, and make an answer of what it said; see `in_child`."""
    if not in_time:
        os.kill(pid, signal.SIGKILL)
    status = _reap(pid)
    said: dict[str, Any] = {}
    for line in lines:
        said.update(line)
    step = str(said.get("step", "start"))
    if "result" in said:
        return dict(said["result"], hung=False)
    if status is None:
        why = "hung at %s: the process cannot even be killed (state %s)" % (step, _state(pid))
        return {"hung": True, "why": why, "step": step}
    if not in_time:
        return {
            "hung": False,
            "timed_out": True,
            "why": "no answer at %s within %g s" % (step, deadline_s),
            "step": step,
        }
    died = str(said.get("died") or "ended by signal %d" % os.WTERMSIG(status))
    return {"hung": False, "why": "the test died at %s: %s" % (step, died), "step": step}


def _reap(pid: int) -> int | None:
    """The child's wait status; None when it does not end. Such a child stays: init inherits it."""
    until = time.monotonic() + KILL_WAIT_S
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return status
        if time.monotonic() > until:
            return None
        time.sleep(0.01)


def _state(pid: int) -> str:
    try:
        with open("/proc/%d/stat" % pid, encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "?"
