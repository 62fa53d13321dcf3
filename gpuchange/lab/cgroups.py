"""A control group per lab host: it keeps hosts apart, freezes them, and finds every process when a lab ends.

Works with cgroup v1, v2 and the hybrid of both: each mounted hierarchy gets
gpuchange-lab/<bridge>/<host>.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

PARENT = "gpuchange-lab"
# cpuset refuses members until its sets are filled in, and nothing here needs it
SKIPPED = {"cpuset"}
# All labs of a machine sit in one group, which would get no more processor time than one single process outside it.
# With this weight they get as much as sixteen; a lab starved by its own client would show faults that are none.
WEIGHTS = {"cpu.shares": "16384", "cpu.weight": "1600"}


def hierarchies() -> list[Path]:
    """Mount points of the cgroup hierarchies of this machine."""
    found = []
    for line in Path("/proc/mounts").read_text().splitlines():
        _, point, kind, options = line.split()[:4]
        if kind in ("cgroup", "cgroup2") and not SKIPPED & set(options.split(",")):
            found.append(Path(point))
    return found


def groups(*names: str) -> list[Path]:
    return [base.joinpath(PARENT, *names) for base in hierarchies()]


def create(bridge: str, host: str) -> list[Path]:
    """Make the host's groups and return them, one a hierarchy."""
    made = groups(bridge, host)
    for group in made:
        group.mkdir(parents=True, exist_ok=True)
    for parent in groups():
        for control, weight in WEIGHTS.items():
            if (parent / control).exists():
                (parent / control).write_text(weight)
    return made


def freeze(bridge: str, host: str, frozen: bool) -> None:
    """Stop or resume every process of a host. Raises OSError when the kernel does not within five seconds."""
    word = "FROZEN" if frozen else "THAWED"
    # file to write, value, file to read until it holds the answer: cgroup v2, then v1
    ways = (
        ("cgroup.freeze", str(int(frozen)), "cgroup.events", f"frozen {int(frozen)}"),
        ("freezer.state", word, "freezer.state", word),
    )
    for control, value, report, answer in ways:
        for group in groups(bridge, host):
            if (group / control).exists():
                (group / control).write_text(value)
                _await(group / report, answer)
                return
    raise OSError("this machine has no cgroup freezer")


def _await(report: Path, answer: str) -> None:
    deadline = time.monotonic() + 5
    while answer not in report.read_text():
        if time.monotonic() > deadline:
            raise OSError(f"{report} does not say {answer!r}")
        time.sleep(0.01)


def processes(*names: str) -> set[int]:
    """Process ids in the group and all groups below it, over all hierarchies."""
    found: set[int] = set()
    for group in groups(*names):
        for directory, _, files in os.walk(group):
            if "cgroup.procs" in files:
                found |= _members(Path(directory))
    return found


def _members(group: Path) -> set[int]:
    try:
        return {int(word) for word in (group / "cgroup.procs").read_text().split()}
    except OSError:  # the group went away, or is of a kind that lists no processes
        return set()


def kill(*names: str) -> bool:
    """SIGKILL whatever still runs in the group; True when nothing is left."""
    for pid in processes(*names):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return not processes(*names)


def remove(*names: str) -> None:
    """Remove the emptied groups, deepest first, and the common parent when nobody else uses it."""
    for group in groups(*names):
        for directory, _, _ in os.walk(group, topdown=False):
            _rmdir(Path(directory))
        _rmdir(group.parent)


def _rmdir(group: Path) -> None:
    try:
        group.rmdir()
    except OSError:  # not there, or still in use by another lab
        return
