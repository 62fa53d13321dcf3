"""The driver's versions, each from its own witness: loaded module, modules on disk, userspace libraries, nvidia-smi."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

_PROC = re.compile(r"Kernel Module(?:\s+for\s+\S+)?\s+(\d+(?:\.\d+)+)")
_VERSION = re.compile(r"\d+(?:\.\d+)+")
_HISTORY = re.compile(r"^(Start-Date|Commandline|Upgrade|Install|Downgrade|Remove):\s*(.*)$", re.M)


class Driver(BaseModel):
    """Versions as text; None when the witness says nothing. `on_disk` is the running kernel's set, by module."""

    model_config = ConfigDict(frozen=True)

    loaded: str | None = None
    open_module: bool | None = None
    loaded_modules: dict[str, str] = {}
    on_disk: dict[str, str] = {}
    files: dict[str, str] = {}
    kernels: dict[str, dict[str, str]] = {}
    userspace: str | None = None
    reported: str | None = None

    @property
    def next_boot(self) -> str | None:
        """What the running kernel will load at its next boot: nvidia's version on disk."""
        return self.on_disk.get("nvidia") or self.on_disk.get("nvidia_current")


def parse_proc(text: str) -> str | None:
    """The version in /proc/driver/nvidia/version (closed, or `Open Kernel Module for x86_64`), or None."""
    found = _PROC.search(text)
    return found[1] if found else None


def parse(facts: Mapping[str, Any], reported: str | None, userspace: str | None) -> Driver:
    """From the facts `loaded`, `on_disk`, `kernel`. Never raises on strange content."""
    loaded = _mapping(facts.get("loaded"))
    text = str(loaded.get("proc_version") or "")
    disk = {kernel: _mapping(modules) for kernel, modules in _mapping(facts.get("on_disk")).items()}
    kernels = {
        kernel: {name: str(_mapping(row).get("version") or "") for name, row in rows.items()}
        for kernel, rows in disk.items()
    }
    running = str(facts.get("kernel") or "")
    return Driver(
        loaded=parse_proc(text),
        open_module="Open Kernel Module" in text if text else None,
        loaded_modules={name: str(version) for name, version in _mapping(loaded.get("modules")).items()},
        on_disk=kernels.get(running, {}),
        files={name: str(_mapping(row).get("file") or "") for name, row in disk.get(running, {}).items()},
        kernels=kernels,
        userspace=userspace,
        reported=reported,
    )


def _mapping(value: Any) -> dict[str, Any]:
    return {str(key): item for key, item in value.items()} if isinstance(value, Mapping) else {}


def inconsistencies(driver: Driver, history: str = "") -> tuple[str, ...]:
    """What does not fit together before anything was changed: a baseline that no rollback could restore."""
    found = []
    if driver.loaded and driver.userspace and driver.loaded != driver.userspace:
        found.append(f"module {driver.loaded} loaded, userspace {driver.userspace}{_who(driver.userspace, history)}")
    if driver.loaded and driver.next_boot and driver.loaded != driver.next_boot:
        found.append(f"module {driver.loaded} loaded, {driver.next_boot} on disk for the next boot")
    return tuple(found) + mixed_modules(driver)


def mixed_modules(driver: Driver) -> tuple[str, ...]:
    """Modules of the running kernel that are not of nvidia.ko's version; each with the file that it came from."""
    odd = {name: version for name, version in driver.on_disk.items() if version and version != driver.next_boot}
    on_disk = [
        f"{name} is {version} ({driver.files.get(name, '?')}), nvidia is {driver.next_boot}"
        for name, version in odd.items()
    ]
    loaded = [
        f"{name} {version} is loaded, nvidia {driver.loaded}"
        for name, version in driver.loaded_modules.items()
        if driver.loaded and version and version != driver.loaded
    ]
    return tuple(sorted(on_disk) + sorted(loaded)) if driver.next_boot or loaded else ()


def _who(version: str, history: str) -> str:
    """Which entry of apt's history brought this version: ` (unattended-upgrade at 2026-01-02 06:10:11)`."""
    for entry in reversed(history.split("\n\n")):
        if version in entry:
            fields = dict(_HISTORY.findall(entry))
            program = fields.get("Commandline", "apt").split()
            name = program[0].rpartition("/")[2] if program else "apt"
            return f" ({name} at {' '.join(fields.get('Start-Date', '?').split())})"
    return ""


def library_version(names: Mapping[str, str]) -> str | None:
    """The userspace driver version: the upstream part of the package that ships libcuda/libnvidia-ml, or None."""
    wanted = re.compile(r"(?:libnvidia-compute(?:-\d+(?:-server)?)?|libnvidia-ml1|libcuda1)")
    for name in sorted(names):
        if wanted.fullmatch(name):
            found = _VERSION.search(names[name].rpartition(":")[2])
            if found:
                return found[0]
    return None


def dkms_trouble(said: Mapping[str, Any]) -> str:
    """Why the dkms database cannot be trusted, or ''. A dkms that is not installed is no trouble."""
    if said.get("hung"):
        return "dkms status hangs"
    text = f"{said.get('out') or ''}\n{said.get('err') or ''}"
    leftover = re.search(r"/var/lib/dkms/([^/\s]+/[^/\s]+)/source/dkms\.conf does not exist", text)
    if leftover:
        return f"dkms database broken by leftover {leftover[1]}"
    if said.get("rc") not in (0, None):
        return f"dkms status ended with {said.get('rc')}: {text.strip()[:200]}"
    return ""
