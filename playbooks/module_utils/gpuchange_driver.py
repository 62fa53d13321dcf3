"""The NVIDIA kernel driver of a host: what is loaded, what lies on disk for the kernel that boots next. Read-only."""

from __future__ import annotations

import functools
import glob
import os
import re
from typing import Any, Dict, List, Tuple

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


def boot_kernel() -> str:
    """The kernel that the next boot takes: the newest one in /boot, or the running one where /boot has none."""
    kernels = [path.rpartition("/vmlinuz-")[2] for path in glob.glob("/boot/vmlinuz-*")]
    return max(kernels, key=functools.cmp_to_key(compare_kernels)) if kernels else os.uname().release


def compare_kernels(one: str, other: str) -> int:
    """Numbers by value, text by letters: 6.8.0-100 is newer than 6.8.0-60."""
    left, right = _parts(one), _parts(other)
    return (left > right) - (left < right)


def _parts(text: str) -> List[Tuple[int, int, str]]:
    found = re.findall(r"\d+|[^\d.\-+~]+", text)
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in found]


def modules_on_disk(kernel: str) -> Dict[str, Dict[str, str]]:
    """{module: {version, file}} of NVIDIA's modules that `kernel` would load."""
    _, out, _ = run(["modinfo", "-k", kernel, *MODULES], limit=1024 * 1024)
    return parse_modinfo(out)


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


def module_name(path: str) -> str:
    """/lib/.../nvidia-current-uvm.ko.zst → nvidia_uvm: Debian puts the flavour into the file's name."""
    stem = os.path.basename(path).partition(".ko")[0].replace("-", "_")
    return re.sub(r"^nvidia_(current|tesla(_\d+)?|legacy_\w+?xx)(?=_|$)", "nvidia", stem)


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
