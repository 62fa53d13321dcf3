"""What rpm and dnf know of a host: the GPU stack's packages, version locks, repositories. Read-only."""

from __future__ import annotations

import hashlib
import os
import re
from typing import Any, Dict

from ansible.module_utils.gpuchange_host import is_executable, read_text, run
from ansible.module_utils.gpuchange_packages import digests, is_stack

RPM_STACK = re.compile(r"(a?kmod|xorg-x11(-drv)?|dnf-plugin)-nvidia.*")
QUERY = "%{NAME}\\t%{ARCH}\\t%{EPOCHNUM}\\t%{VERSION}-%{RELEASE}\\n"
LOCKS = "/etc/dnf/plugins/versionlock.list"
SOURCE_FILES = ("/etc/yum.repos.d/*.repo", "/etc/dnf/dnf.conf")
DUPLICATE = "duplicate"
LOCKED = re.compile(r"^!?(?P<name>.+)-(?:\d+:)?[^-]+-[^-]+$")
LIMIT = 16 * 1024 * 1024
Rows = Dict[str, Dict[str, str]]


def has_dnf() -> bool:
    return is_executable("rpm") and is_executable("dnf")


def installed(root: str = "/") -> Rows:
    """{name: {name, arch, version, status}}; foreign ones are name.arch. A name that is there twice is a duplicate."""
    _, out, _ = run(["rpm", "--root", root, "-qa", "--qf", QUERY], timeout=30, limit=LIMIT)
    return parse_installed(out, os.uname().machine)


def parse_installed(text: str, native: str) -> Rows:
    rows: Rows = {}
    for line in sorted(text.splitlines()):
        fields = line.split("\t")
        if len(fields) != 4 or fields[0] == "gpg-pubkey":
            continue
        name, arch, epoch, version = fields
        key = name if arch in (native, "noarch", "(none)") else "%s.%s" % (name, arch)
        full = "%s:%s" % (epoch, version) if epoch not in ("0", "(none)") else version
        both = key in rows and not is_multi(name)
        status = DUPLICATE if both else "installed"
        found = "%s, %s" % (rows[key]["version"], full) if both else full
        rows[key] = {"name": name, "arch": arch, "version": found, "status": status}
    return rows


def is_multi(name: str) -> bool:
    """Kernels may be there several times."""
    return re.fullmatch(r"kernel(-.*)?", name) is not None


def is_rpm_stack(name: str) -> bool:
    return is_stack(name) or RPM_STACK.fullmatch(name) is not None


def upstream(version: str) -> str:
    """3:570.172.08-1.el9 → 570.172.08."""
    return version.rpartition(":")[2].rpartition("-")[0] or version


def locks(text: str) -> Dict[str, str]:
    """{name: line} of dnf's version locks."""
    found = {}
    for line in text.splitlines():
        match = LOCKED.match(line.strip())
        if match and not line.startswith("#"):
            found[match.group("name")] = line
    return found


def locks_moved(text: str, install: Dict[str, str]) -> str:
    """The list of locks with those of `install` ({name: version}) at their new version; others stay as they are."""
    lines = []
    for line in text.splitlines():
        match = LOCKED.match(line.strip())
        name = match.group("name") if match and not line.startswith("#") else ""
        version = install.get(name, "")
        new = version if ":" in version else "0:" + version
        lines.append("%s-%s.*" % (name, new) if version else line)
    return "".join(line + "\n" for line in lines)


def lock_text() -> str:
    return read_text(LOCKS)


def rpm_snapshot() -> Dict[str, Any]:
    """The rpm side of a host's package state, in the shape of gpuchange_packages.packages_snapshot."""
    rows = installed()
    stack = {key: row for key, row in rows.items() if is_rpm_stack(row["name"])}
    others = sorted("%s=%s" % (key, row["version"]) for key, row in rows.items() if key not in stack)
    return {
        "packages": {key: row["version"] for key, row in stack.items()},
        "broken": {key: row["status"] for key, row in rows.items() if row["status"] != "installed"},
        "others": {"count": len(others), "sha256": hashlib.sha256("\n".join(others).encode()).hexdigest()},
        "holds": sorted(locks(lock_text()).values()),
        "sources": digests(SOURCE_FILES),
    }


def with_rpms(snapshot: Dict[str, Any]) -> Dict[str, Any]:
    """A package snapshot with what rpm knows beside it; on a host without rpm packages it is as it was."""
    if not has_dnf():
        return snapshot
    ours = rpm_snapshot()
    if not ours["others"]["count"] and not ours["packages"]:
        return snapshot
    merged = dict(snapshot)
    for key in ("packages", "broken", "sources"):
        merged[key] = {**ours[key], **(snapshot.get(key) or {})}
    merged["holds"] = [*(snapshot.get("holds") or []), *ours["holds"]]
    merged["others"] = {**(snapshot.get("others") or {}), "rpms": ours["others"]["sha256"]}
    return merged


def working() -> str:
    """Another package operation that is at work on this host now: `dnf upgrade (pid 4711)`; "" when there is none."""
    for path in ("/var/lib/dnf/rpmdb_lock.pid", "/var/cache/dnf/metadata_lock.pid"):
        pid = read_text(path).strip()
        if pid.isdigit() and os.path.isdir("/proc/" + pid):
            command = " ".join(read_text("/proc/%s/cmdline" % pid).replace("\0", " ").split()[:6])
            return "%s (pid %s)" % (command, pid)
    return ""
