"""The NVIDIA kernel driver of a host: what is loaded, what lies on disk for the kernel that boots next. Read-only."""

from __future__ import annotations

import os
import re
from typing import Any, Dict, List

from ansible.module_utils.gpuchange_boot import boot_kernel, initramfs, module_name
from ansible.module_utils.gpuchange_host import read_text, run

PROC_VERSION = "/proc/driver/nvidia/version"
MODULES = ("nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm", "nvidia_peermem")


def parse_proc_version(text: str) -> str:
    """/proc/driver/nvidia/version → 570.172.08; "" when no driver is loaded."""
    match = re.search(r"Kernel Module.*?\s(\d{3,}\.\d+(?:\.\d+)?)\s", text + " ")
    return match.group(1) if match else ""


def loaded_version() -> str:
    return parse_proc_version(read_text(PROC_VERSION))


def is_open(text: str) -> bool:
    return "Open Kernel Module" in text


def modules_on_disk(kernel: str) -> Dict[str, Dict[str, str]]:
    """{module: {version, file}} of NVIDIA's modules that `kernel` would load."""
    _, out, _ = run(["modinfo", "-k", kernel, *module_names(kernel)], limit=1024 * 1024)
    found = parse_modinfo(out)  # an index that nobody has brought up to date still lists what is gone
    return {name: row for name, row in found.items() if os.path.exists(row["file"])}


def module_names(kernel: str, modules: str = "/lib/modules") -> List[str]:
    """What NVIDIA's modules may be called: Debian's are nvidia-current and the like, which only modprobe knows."""
    files = [name for _, _, names in os.walk(os.path.join(modules, kernel)) for name in names]  # not into build/
    found = {name.partition(".ko")[0] for name in files if re.match(r"nvidia[\w-]*\.ko", name)}
    return [*MODULES, *sorted(found - set(MODULES))]


def parse_modinfo(text: str) -> Dict[str, Dict[str, str]]:
    """modinfo's records, one for each file: {module: {version, file}}; built-in ones have no file."""
    found: Dict[str, Dict[str, str]] = {}
    entry: Dict[str, str] = {}
    for field, value in re.findall(r"^(filename|version):\s+(.*)$", text, flags=re.M):
        if field == "filename":
            entry = {"version": "", "file": value}
            if value.startswith("/"):
                found[module_name(value)] = entry
        else:
            entry["version"] = value
    return found


def disk_problem(wanted: str, kernel: str, modules: Dict[str, Dict[str, str]]) -> str:
    """Why the driver `wanted` will not load under `kernel`, naming the odd module and its file; "" when all fit."""
    if "nvidia" not in modules:
        return "no nvidia module %s exists for kernel %s" % (wanted, kernel)
    odd = [
        "%s is %s (%s)" % (name, entry["version"] or "of no version", entry["file"])
        for name, entry in modules.items()
        if entry["version"] != wanted
    ]
    return "no complete nvidia module set %s exists for kernel %s: %s" % (wanted, kernel, ", ".join(odd)) if odd else ""


def boot_problem(wanted: str, kernel: str) -> str:
    """Why the next boot, of `kernel`, will not load the driver `wanted`: what lies on disk, and in its initramfs."""
    why = disk_problem(wanted, kernel, modules_on_disk(kernel))
    image = initramfs(kernel)
    odd = [
        "%s %s (%s)" % (name, row["version"], row["file"])
        for name, row in image["modules"].items()
        if row["version"] not in ("", wanted)
    ]
    if why or not odd:
        return why
    return "%s still has %s; mend it with update-initramfs -u -k %s" % (image["file"], ", ".join(odd), kernel)


def driver_state() -> Dict[str, Any]:
    """{loaded, open, kernel, boot_kernel, modules}: what a stack step decides on."""
    text, kernel = read_text(PROC_VERSION), boot_kernel()
    return {
        "loaded": parse_proc_version(text),
        "open": is_open(text),
        "kernel": os.uname().release,
        "boot_kernel": kernel,
        "modules": modules_on_disk(kernel),
    }
