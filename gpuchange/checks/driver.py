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
    """Versions as text; None when the witness says nothing. `on_disk` is the set of the kernel that boots next."""

    model_config = ConfigDict(frozen=True)

    loaded: str | None = None
    open_module: bool | None = None
    loaded_modules: dict[str, str] = {}
    on_disk: dict[str, str] = {}
    files: dict[str, str] = {}
    kernels: dict[str, dict[str, str]] = {}
    boot_kernel: str = ""
    initramfs: dict[str, str] = {}
    """Module → "version (file)" of those that the next boot's initramfs holds."""
    libraries: dict[str, str] = {}
    """libcuda, libnvidia-ml → the version in the name of the file that the loader picks."""
    userspace: str | None = None
    reported: str | None = None

    @property
    def next_boot(self) -> str | None:
        """What the next boot will load: nvidia's version on disk for its kernel."""
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
    boot = _mapping(facts.get("boot"))
    kernel = str(boot.get("kernel") or facts.get("kernel") or "")
    libraries = _libraries(facts)
    return Driver(
        loaded=parse_proc(text),
        open_module="Open Kernel Module" in text if text else None,
        loaded_modules={name: str(version) for name, version in _mapping(loaded.get("modules")).items()},
        on_disk=kernels.get(kernel, {}),
        files={name: str(_mapping(row).get("file") or "") for name, row in disk.get(kernel, {}).items()},
        kernels=kernels,
        boot_kernel=kernel,
        initramfs=_initramfs(boot),
        libraries=libraries,
        userspace=userspace or libraries.get("libnvidia-ml") or libraries.get("libcuda"),
        reported=reported,
    )


def _initramfs(boot: Mapping[str, Any]) -> dict[str, str]:
    image = _mapping(boot.get("initramfs"))
    modules = {name: _mapping(row) for name, row in _mapping(image.get("modules")).items()}
    return {name: f"{row.get('version')} ({image.get('file')}: {row.get('file')})" for name, row in modules.items()}


def _libraries(facts: Mapping[str, Any]) -> dict[str, str]:
    """The driver's libraries by the file behind what the loader's cache names first, else behind any copy."""
    found = {}
    for stem, raw in _mapping(facts.get("userspace")).items():
        row = _mapping(raw)
        copies = [_mapping(copy) for copy in row.get("copies") or () if isinstance(copy, Mapping)]
        lines = row.get("loader") if isinstance(row.get("loader"), list) else []
        picked = [str(line).rpartition("=> ")[2] for line in lines or ()][:1]
        reals = [str(copy.get("real")) for copy in copies if not picked or copy.get("path") in picked]
        version = next(
            (real.rpartition(".so.")[2] for real in reals if _VERSION.fullmatch(real.rpartition(".so.")[2])), ""
        )
        if version.partition(".")[2]:  # libcuda.so.1 alone is no version
            found[stem] = version
    return found


def _mapping(value: Any) -> dict[str, Any]:
    return {str(key): item for key, item in value.items()} if isinstance(value, Mapping) else {}


def inconsistencies(driver: Driver, history: str = "") -> tuple[str, ...]:
    """What does not fit together before anything was changed: a baseline that no rollback could restore."""
    found = []
    if driver.loaded and driver.userspace and driver.loaded != driver.userspace:
        found.append(f"module {driver.loaded} loaded, userspace {driver.userspace}{_who(driver.userspace, history)}")
    if driver.loaded and driver.next_boot and driver.loaded != driver.next_boot:
        found.append(f"module {driver.loaded} loaded, {driver.next_boot} on disk for the next boot")
    if driver.loaded and not driver.next_boot and any(driver.kernels.values()):
        found.append(f"module {driver.loaded} loaded, none on disk for kernel {driver.boot_kernel}, which boots next")
    return tuple(found) + _odd_libraries(driver) + mixed_modules(driver)


def _odd_libraries(driver: Driver) -> tuple[str, ...]:
    """Libraries that are not what the packages say: put there by something else, in front of or over them."""
    return tuple(
        f"{name}.so is {version}, the installed packages are {driver.userspace}"
        for name, version in sorted(driver.libraries.items())
        if driver.userspace and version != driver.userspace
    )


def mixed_modules(driver: Driver) -> tuple[str, ...]:
    """Modules that are not of nvidia.ko's version: on disk and in the initramfs of the kernel that boots next, and
    loaded; each with the file that it came from."""
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
    stale = [
        f"{name} is {said}, nvidia is {driver.next_boot}"
        for name, said in driver.initramfs.items()
        if driver.next_boot and said.partition(" ")[0] not in ("", driver.next_boot)
    ]
    return tuple(sorted(on_disk) + sorted(stale) + sorted(loaded)) if driver.next_boot or loaded else ()


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
    wanted = re.compile(
        r"(?:libnvidia-compute(?:-\d+(?:-server)?)?|libnvidia-ml1|libcuda1|nvidia-driver-(?:cuda-)?libs)"
    )
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
    left = said.get("leftovers")
    if isinstance(left, list) and left:
        return f"dkms database broken by leftover {', '.join(str(name) for name in left)}"
    leftover = re.search(r"/var/lib/dkms/([^/\s]+/[^/\s]+)/source/dkms\.conf does not exist", text)
    if leftover:
        return f"dkms database broken by leftover {leftover[1]}"
    if said.get("rc") not in (0, None):
        return f"dkms status ended with {said.get('rc')}: {text.strip()[:200]}"
    return ""
