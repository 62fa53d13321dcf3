"""Who holds a GPU: found by open handles on /dev/nvidia*, which works also when NVML does not."""

from __future__ import annotations

import os
from typing import Any, Dict, Iterable, List, Set

from ansible.module_utils.gpuchange_look import read_text

DEVICES = ("/dev/nvidia", "/dev/dri/")


def scan(proc: str = "/proc", devices: Iterable[str] = DEVICES[:1]) -> List[Dict[str, Any]]:
    """Every process with a device below `devices` open or mapped: pid, comm, cmdline, unit, uid, devices; by pid."""
    prefixes = tuple(devices)
    pids = sorted(int(name) for name in os.listdir(proc) if name.isdigit())
    held = ((pid, _held(os.path.join(proc, str(pid), "fd"), prefixes) | _mapped(proc, pid, prefixes)) for pid in pids)
    return [_describe(proc, pid, paths) for pid, paths in held if paths]


def _held(directory: str, prefixes: Iterable[str]) -> Set[str]:
    paths = set()
    try:
        names = os.listdir(directory)
    except OSError:  # gone, or not ours to look into
        return paths
    for name in names:
        try:
            target = os.readlink(os.path.join(directory, name))
        except OSError:
            continue
        if target.startswith(tuple(prefixes)):
            paths.add(target.replace(" (deleted)", ""))
    return paths


def _mapped(proc: str, pid: int, prefixes: Iterable[str]) -> Set[str]:
    """Devices that are still mapped though their descriptor is closed: the driver counts them as in use."""
    try:
        with open(os.path.join(proc, str(pid), "maps"), "rb") as file:
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:  # gone, or not ours to look into
        return set()
    paths = {line.split(None, 5)[5] for line in lines if " /dev/" in line}
    return {path.replace(" (deleted)", "") for path in paths if path.startswith(tuple(prefixes))}


def _describe(proc: str, pid: int, paths: Set[str]) -> Dict[str, Any]:
    base = os.path.join(proc, str(pid))
    try:
        uid = os.stat(base).st_uid
    except OSError:
        uid = -1
    return {
        "pid": pid,
        "comm": read_text(os.path.join(base, "comm"), 256).strip(),
        "cmdline": read_text(os.path.join(base, "cmdline"), 512).replace("\0", " ").strip(),
        "unit": unit_of(read_text(os.path.join(base, "cgroup"), 8192)),
        "uid": uid,
        "devices": sorted(paths),
    }


def unit_of(cgroup: str) -> str:
    """The systemd unit named by /proc/PID/cgroup (v2, or v1's name=systemd), or ''."""
    for line in cgroup.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number != "0" and controllers != "name=systemd":
            continue
        units = [part for part in path.split("/") if part.endswith((".service", ".scope"))]
        if units:
            return units[-1]
    return ""
