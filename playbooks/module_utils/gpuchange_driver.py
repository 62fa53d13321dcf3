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
    found = {}
    for name in MODULES:
        rc, out, _ = run(["modinfo", "-k", kernel, name])
        fields = dict(re.findall(r"^(filename|version):\s+(.*)$", out, flags=re.M))
        if rc == 0 and fields.get("filename", "").startswith("/"):
            found[name] = {"version": fields.get("version", ""), "file": fields["filename"]}
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
