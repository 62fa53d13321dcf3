"""Facts of the machine itself: identity, system, space, paths, units. Read-only."""

from __future__ import annotations

import ctypes
import glob
import os
import platform
import shutil
import struct
import sys
import time
from typing import Any, Dict, Iterable, List, Optional

from ansible.module_utils.gpuchange_look import PATH, read_bytes, read_text, run

UNIT_PATTERNS = ["nvidia-*", "nv-*", "dcgm*"]
TIMERS = ["apt-daily.timer", "apt-daily-upgrade.timer", "unattended-upgrades.service", "dnf-automatic.timer"]
NOT_SYNCHRONIZED_US = 16_000_000  # the kernel's own mark for a clock that nobody sets
UNIT_PROPERTIES = "Id,LoadState,ActiveState,SubState,UnitFileState"


def identity() -> Dict[str, Any]:
    dmi = "/sys/class/dmi/id/"
    return {
        "machine_id": read_text("/etc/machine-id", 64).strip(),
        "boot_id": read_text("/proc/sys/kernel/random/boot_id", 64).strip(),
        "hostname": platform.node(),
        "chassis": {
            name: read_text(dmi + name, 256).strip() for name in ("sys_vendor", "product_name", "product_serial")
        },
    }


def system() -> Dict[str, Any]:
    uptime = read_text("/proc/uptime", 64).split()
    return {
        "kernel": platform.release(),
        "arch": platform.machine(),
        "os_release": read_text("/etc/os-release", 4096),
        "uptime_s": float(uptime[0]) if uptime else None,
        "uid": os.geteuid(),
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "systemd": os.path.isdir("/run/systemd/system"),
        "secure_boot": secure_boot(),
        "reboot_required": read_text("/run/reboot-required.pkgs", 4096).split(),
        "at": time.time(),
    }


def secure_boot(variables: str = "/sys/firmware/efi/efivars") -> Optional[bool]:
    """The firmware's own variable: four bytes of attributes, then the value. None where there is none (no UEFI)."""
    for path in glob.glob(variables + "/SecureBoot-*"):
        value = read_bytes(path, 8)
        return value[4] == 1 if len(value) > 4 else None
    return None


def binaries(names: Iterable[str]) -> Dict[str, str]:
    """{program: its path, or ''} for the programs that the plan's providers need on this host."""
    return {name: shutil.which(name, path=PATH) or "" for name in names}


def clock() -> Dict[str, Any]:
    """`synchronized`: yes, no, or "" when the kernel does not say.

    Asked of the kernel, not of timedatectl: that starts a service, which leaves a directory in /var/tmp.
    """
    timex = ctypes.create_string_buffer(512)  # struct timex with modes 0: only read
    try:
        readable = ctypes.CDLL(None).adjtimex(timex) >= 0
    except (AttributeError, OSError):
        readable = False
    word = struct.calcsize("l")
    largest_error = struct.unpack_from("l", timex, 3 * word)[0]  # modes (padded), offset, freq, maxerror in µs
    synchronized = "yes" if largest_error < NOT_SYNCHRONIZED_US else "no"
    return {"epoch": time.time(), "synchronized": synchronized if readable else ""}


def space(paths: Iterable[str]) -> Dict[str, Dict[str, Any]]:
    """Free bytes and inodes of the filesystem that holds (or would hold) each path."""
    return {path: _space(_nearest(path)) for path in paths}


def _nearest(path: str) -> str:
    while not os.path.exists(path) and path != "/":
        path = os.path.dirname(path.rstrip("/")) or "/"
    return path


def _space(path: str) -> Dict[str, Any]:
    stat = os.statvfs(path)
    return {
        "on": path,
        "free": stat.f_bavail * stat.f_frsize,
        "total": stat.f_blocks * stat.f_frsize,
        "inodes_free": stat.f_favail if stat.f_files else None,  # btrfs counts no inodes
        "read_only": bool(stat.f_flag & os.ST_RDONLY),
    }


def paths(wanted: Iterable[str]) -> Dict[str, Dict[str, Any]]:
    """For each path: kind, whether it is a mount point, its filesystem (mount, type, source, uuid), whether empty."""
    mounts = _mounts()
    uuids = _uuids()
    return {path: _path(path, mounts, uuids) for path in wanted}


def _path(path: str, mounts: List[Dict[str, str]], uuids: Dict[str, str]) -> Dict[str, Any]:
    kind = (
        "dir" if os.path.isdir(path) else "file" if os.path.isfile(path) else "other" if os.path.lexists(path) else ""
    )
    real = os.path.realpath(path)
    over = [mount for mount in mounts if real == mount["mount"] or real.startswith(mount["mount"].rstrip("/") + "/")]
    mount = max(over, key=lambda one: len(one["mount"])) if over else {}
    source = mount.get("source", "")
    return {
        "kind": kind,
        "is_mount": bool(kind) and os.path.ismount(path),
        "empty": _empty(path) if kind == "dir" else None,
        "filesystem": dict(mount, uuid=uuids.get(os.path.realpath(source), "")),
    }


def _empty(path: str) -> Optional[bool]:
    try:
        with os.scandir(path) as entries:
            return next(entries, None) is None
    except OSError:
        return None


def _mounts() -> List[Dict[str, str]]:
    """/proc/self/mountinfo in order; a later line at the same point lies on top of the earlier."""
    seen: Dict[str, Dict[str, str]] = {}
    for line in read_text("/proc/self/mountinfo", 1024 * 1024).splitlines():
        left, _, right = line.partition(" - ")
        fields, tail = left.split(), right.split()
        if len(fields) > 5 and len(tail) > 1:
            point = _unescape(fields[4])
            seen[point] = {"mount": point, "type": tail[0], "source": _unescape(tail[1]), "root": _unescape(fields[3])}
    return list(seen.values())


def _unescape(text: str) -> str:
    for code, sign in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, sign)
    return text


def _uuids() -> Dict[str, str]:
    base = "/dev/disk/by-uuid"
    names = os.listdir(base) if os.path.isdir(base) else []
    return {os.path.realpath(os.path.join(base, name)): name for name in names}


def units(listed: Iterable[str]) -> Dict[str, Dict[str, str]]:
    """State of the listed units, of NVIDIA's and of the apt timers: {unit: {load, active, sub, enabled}}."""
    if not os.path.isdir("/run/systemd/system"):
        return {}
    files = run(["systemctl", "list-unit-files", "--no-legend", "--plain", "--no-pager", *UNIT_PATTERNS], 10.0)
    alive = run(["systemctl", "list-units", "--all", "--no-legend", "--plain", "--no-pager", *UNIT_PATTERNS], 10.0)
    found = {line.split()[0] for line in (files["out"] + alive["out"]).splitlines() if line.split()}
    names = sorted({name for name in found if "@." not in name} | {_full(name) for name in listed} | set(TIMERS))
    shown = run(["systemctl", "show", "--no-pager", "--property=" + UNIT_PROPERTIES, *names], 10.0, 512 * 1024)
    return dict(_unit(block) for block in shown["out"].split("\n\n") if "Id=" in block)


def _full(name: str) -> str:
    known = (".service", ".timer", ".socket", ".target", ".path", ".mount", ".slice")
    return name if name.endswith(known) else name + ".service"


def _unit(block: str) -> "tuple[str, Dict[str, str]]":
    fields = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
    return fields.get("Id", ""), {
        "load": fields.get("LoadState", ""),
        "active": fields.get("ActiveState", ""),
        "sub": fields.get("SubState", ""),
        "enabled": fields.get("UnitFileState", ""),
    }
