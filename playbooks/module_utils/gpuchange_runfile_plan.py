"""What a change by an NVIDIA .run installer would do to this host, read without changing it."""

from __future__ import annotations

import glob
import os
from typing import Any, Dict, List, Optional

from ansible.module_utils import gpuchange_secure_boot
from ansible.module_utils.gpuchange_apt_choice import DRIVER_CORE
from ansible.module_utils.gpuchange_apt_look import MIB, STORE, free_bytes
from ansible.module_utils.gpuchange_boot import initramfs
from ansible.module_utils.gpuchange_dkms import can_build, headers_problem
from ansible.module_utils.gpuchange_driver import boot_problem, driver_state
from ansible.module_utils.gpuchange_host import is_executable, read_text, run
from ansible.module_utils.gpuchange_packages import installed
from ansible.module_utils.gpuchange_runfile_look import (
    file_problem,
    head,
    installed_run,
    kept,
    library_versions,
    missing,
)

ALTERNATE = "/usr/lib/nvidia/alternate-install-present"
NOUVEAU = "/sys/module/nouveau"
X_LOCKS = "/tmp/.X*-lock"
BUILDERS = ("cc", "make")
RPM_DRIVER = ("nvidia-driver*", "kmod-nvidia*", "xorg-x11-drv-nvidia*", "akmod-nvidia*")


def examine(wanted: Dict[str, Any]) -> Dict[str, Any]:
    """The preflight report's body. `wanted`: driver, file, sha256, previous {file, sha256} or None, module, dkms."""
    now, state = installed_run(), driver_state()
    ready = as_wanted(wanted, now, state)
    previous, no_way_back = earlier(wanted, now) if not ready else (None, "")
    sizes = _sizes(wanted, previous)
    problems = [] if ready else _problems(wanted, state) + ([no_way_back] if no_way_back else []) + _space(sizes)
    return {
        "as_wanted": ready,
        "before": {"driver": state["loaded"] or now["version"]},
        "after": {"driver": wanted["driver"]},
        "transaction": _transaction(wanted, previous, state),
        "reboot_needed": bool(state["loaded"]) and state["loaded"] != wanted["driver"],
        "driver": state,
        "sizes": sizes,
        "not_obtainable": _not_obtainable(now, previous) if not ready else [],
        "problems": problems,
        "findings": _findings(now),
    }


def as_wanted(wanted: Dict[str, Any], now: Dict[str, Any], state: Dict[str, Any]) -> bool:
    flavour = wanted["module"] == "keep" or state["open"] == (wanted["module"] == "open")
    versions = {now["version"], state["loaded"], *library_versions().values()}
    whole = not missing(now["paths"]) and not boot_problem(wanted["driver"], state["boot_kernel"])
    return versions == {wanted["driver"]} and flavour and whole


def earlier(wanted: Dict[str, Any], now: Dict[str, Any]) -> Any:
    """({file, sha256, version} of the installer that leads back, or None; what is wrong with the plan's one)."""
    version, named = now["version"], wanted.get("previous")
    if not version:
        return None, ""
    if version == wanted["driver"]:
        return {"file": wanted["file"], "sha256": wanted["sha256"], "version": version}, ""
    if named:
        why = file_problem(named["file"], named["sha256"], version)
        return (None, "stack.previous: " + why) if why else (dict(named, version=version), "")
    found = kept(version)
    return ({"file": found[0], "sha256": found[1], "version": version} if found else None), ""


def _not_obtainable(now: Dict[str, Any], previous: Optional[Dict[str, Any]]) -> List[str]:
    if not now["version"] or previous:
        return []
    return ["driver %s, whose .run file is not on the host (name it in stack.previous)" % now["version"]]


def _transaction(wanted: Dict[str, Any], previous: Optional[Dict[str, Any]], state: Dict[str, Any]) -> Dict[str, Any]:
    flavour = wanted["module"]
    if flavour == "keep":
        flavour = ("open" if state["open"] else "proprietary") if state["loaded"] else ""
    return {
        "driver": wanted["driver"],
        "installer": {"file": wanted["file"], "sha256": wanted["sha256"], "version": wanted["driver"]},
        "previous": previous,
        "module": flavour,
        "dkms": bool(wanted["dkms"]),
        "options": list(wanted.get("options") or []),
    }


def _problems(wanted: Dict[str, Any], state: Dict[str, Any]) -> List[str]:
    found = [
        file_problem(wanted["file"], wanted["sha256"], wanted["driver"]),
        packages_problem(),
        nouveau_problem(),
        x_problem(),
        flavour_problem(wanted),
        kernel_problem(wanted, state),
        headers_problem(state["boot_kernel"]),
        tools_problem(wanted),
        gpuchange_secure_boot.problem(),
    ]
    return [problem for problem in found if problem]


def packages_problem() -> str:
    """The driver's packages, which a .run file would half overwrite; "" when there are none."""
    rows = installed() if is_executable("dpkg-query") else {}
    names = ["%s %s" % (key, row["version"]) for key, row in sorted(rows.items()) if DRIVER_CORE.fullmatch(row["name"])]
    names += run(["rpm", "-qa", *RPM_DRIVER])[1].split() if is_executable("rpm") else []
    if names:
        said = "the driver is installed from packages (%s%s), which a .run file would half overwrite; %s"
        more = " and %d more" % (len(names) - 3) if len(names) > 3 else ""
        return said % (
            ", ".join(names[:3]),
            more,
            "change it with those (stack: {provider: apt}), or remove them first",
        )
    if os.path.exists(ALTERNATE):
        words = " ".join(read_text(ALTERNATE).split())[:200]
        return "another way of installing the driver is in use (%s: %s); use that, or remove it first" % (
            ALTERNATE,
            words,
        )
    return ""


def nouveau_problem() -> str:
    if not os.path.isdir(NOUVEAU):
        return ""
    return (
        "nouveau drives the cards, the installer would stop: write `blacklist nouveau` and `options nouveau modeset=0`"
        " into /etc/modprobe.d/, rebuild the initramfs, reboot"
    )


def x_problem() -> str:
    """X servers that are at work: the installer stops beside one."""
    pids = [read_text(path).strip() for path in sorted(glob.glob(X_LOCKS))]
    alive = [pid for pid in pids if pid.isdigit() and os.path.isdir("/proc/" + pid)]
    return "an X server is running (pid %s): stop the display manager first" % ", ".join(alive) if alive else ""


def flavour_problem(wanted: Dict[str, Any]) -> str:
    """A kernel module flavour that this installer does not offer a choice of."""
    if wanted["module"] == "keep" or not os.path.isfile(wanted["file"]):
        return ""
    options = head(wanted["file"])["options"]
    known = "--kernel-module-type" in options or "--kernel-module-build-directory" in options
    return "" if known else "%s gives no choice of kernel modules: leave out stack.module" % wanted["file"]


def kernel_problem(wanted: Dict[str, Any], state: Dict[str, Any]) -> str:
    """Without DKMS the installer builds for the kernel that runs, and for no other."""
    if wanted["dkms"] or state["kernel"] == state["boot_kernel"]:
        return ""
    said = "kernel %s runs, %s boots next: without dkms only the first gets a module; reboot first, or write dkms: true"
    return said % (state["kernel"], state["boot_kernel"])


def tools_problem(wanted: Dict[str, Any]) -> str:
    lacking = [name for name in (*BUILDERS, *(("dkms",) if wanted["dkms"] else ())) if not is_executable(name)]
    return "not installed on this host: %s; the kernel module cannot be built" % ", ".join(lacking) if lacking else ""


def _sizes(wanted: Dict[str, Any], previous: Optional[Dict[str, Any]]) -> Dict[str, int]:
    def size(path: str) -> int:
        return os.path.getsize(path) if os.path.isfile(path) else 0

    return {
        "download": size(wanted["file"]),
        "keep": size(previous["file"]) if previous else 0,
        "installed": head(wanted["file"])["kib"] * 1024,
        "free_store": free_bytes(STORE),
        "free_usr": free_bytes("/usr"),
    }


def _space(sizes: Dict[str, int]) -> List[str]:
    """Installers are kept, one is unpacked beside them; /usr gets its files while the old ones may still be there."""
    needs = (
        (STORE, sizes["download"] + sizes["keep"] + sizes["installed"] + 64 * MIB, sizes["free_store"]),
        ("/usr", sizes["installed"] + 512 * MIB, sizes["free_usr"]),
    )
    return [
        "%s has %d MiB free, the change needs %d MiB" % (path, free // MIB, need // MIB)
        for path, need, free in needs
        if free < need
    ]


def _findings(now: Dict[str, Any]) -> List[str]:
    lost = missing(now["paths"])
    if not lost:
        return []
    return ["%d files of the installed driver %s are gone, %s first" % (len(lost), now["version"], lost[0])]


def installer_argv(
    path: str, flavour: str, dkms: bool, options: List[str], folder: str, state: Dict[str, Any]
) -> List[str]:
    """The call of one installer, with what it knows of: nothing is asked, the running driver is left alone."""
    known = head(path)["options"]
    argv = ["sh", path, "--silent", "--tmpdir", folder]
    if flavour and "--kernel-module-type" in known:
        argv.append("--kernel-module-type=" + flavour)
    elif flavour and "--kernel-module-build-directory" in known:
        argv.append("--kernel-module-build-directory=" + ("kernel-open" if flavour == "open" else "kernel"))
    if dkms:
        argv.append("--dkms")
    elif "--no-dkms" in known:
        argv.append("--no-dkms")
    if state["loaded"]:
        argv += [name for name in ("--allow-installation-with-running-driver", "--skip-module-load") if name in known]
    if "--rebuild-initramfs" in known and initramfs(state["boot_kernel"])["modules"]:
        argv.append("--rebuild-initramfs")
    return argv + options


def had_dkms(version: str) -> bool:
    return can_build(os.uname().release) and os.path.isdir("/var/lib/dkms/nvidia/" + version)
