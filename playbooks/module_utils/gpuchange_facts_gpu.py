"""Facts of the GPU stack: driver, cards, CUDA, cuDNN, fabric manager, container toolkit. Read-only."""

from __future__ import annotations

import glob
import hashlib
import os
import re
import time
import zlib
from typing import Any, Dict, List

from ansible.module_utils import gpuchange_boot, gpuchange_dkms
from ansible.module_utils.gpuchange_look import link_hops, read_bytes, read_text, run

SMI_LIMIT = 2 * 1024 * 1024
FABRIC_UNIT = "nvidia-fabricmanager.service"
CARD_DEADLINE_S = 5.0
ONE_IS_DEAD = re.compile(r"device handle for GPU|GPU is lost|GPU requires reset", re.I)
MODULES = ("nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm", "nvidia_peermem")
MODULE_PLACES = (
    "updates",
    "extra",
    "weak-updates",
    "kernel/drivers/video",
    "kernel/nvidia*",
    "kernel/drivers/char/drm",
)
LIBRARIES = (
    "/usr/lib/*-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/cuda*/lib64",
    "/usr/local/cuda*/lib",
    "/usr/local/lib",
    "/usr/local/cudnn*/lib*",
    "/opt/cudnn*/lib*",
)
TOOLKITS = ("/usr/local/cuda*", "/opt/cuda*", "/usr/lib/cuda")
_ENVIRONMENTS = ("/usr/local", "/root/*", "/srv/*", "/srv/*/*", "/opt/*", "/opt/*/*", "/opt/*/envs/*", "/home/*/*")
PYTHONS = tuple(
    "%s/lib/python*/%s" % (place, kind) for place in _ENVIRONMENTS for kind in ("site-packages", "dist-packages")
)
HEADERS = ("/usr/include", "/usr/include/*-linux-gnu", "/usr/local/cuda*/include", "/usr/local/include")
TOOLKIT_FILES = (
    "/etc/nvidia-container-runtime/config.toml",
    "/etc/docker/daemon.json",
    "/etc/containerd/config.toml",
    "/etc/containerd/conf.d/*.toml",
    "/etc/crio/crio.conf.d/*",
    "/etc/containers/containers.conf.d/*",
    "/etc/cdi/*",
    "/usr/share/containers/oci/hooks.d/*nvidia*",
)
HISTORIES = ("/var/log/apt/history.log.1.gz", "/var/log/apt/history.log")


def smi(deadline_s: float = 20.0) -> Dict[str, Any]:
    """`nvidia-smi -q -x`, raw, and beside it what the XML does not tell in the case at hand.

    list, instances: profiles and places of MIG devices; table: where the XML is torn; each: {slot: what -i SLOT says},
    where one card that does not answer silences all.
    """
    end = time.monotonic() + deadline_s
    said = _query([], deadline_s)
    if said["rc"] is None or said["cut"]:
        return said
    if "<current_mig>Enabled" in said["out"]:
        said["list"] = run(["nvidia-smi", "-L"], CARD_DEADLINE_S)["out"]
        said["instances"] = run(["nvidia-smi", "mig", "-lgi"], CARD_DEADLINE_S)["out"]
    if said["rc"] == 0 and "</nvidia_smi_log>" not in said["out"]:
        said["table"] = run(["nvidia-smi"], CARD_DEADLINE_S)["out"]
    if said["rc"] and ONE_IS_DEAD.search(said["out"] + said["err"]):
        said["each"] = _each(end)
    return said


def _query(more: List[str], deadline_s: float) -> Dict[str, Any]:
    """Without the list of supported clocks: it is most of the text and says nothing here."""
    said = run(["nvidia-smi", "-q", "-x", *more], deadline_s, SMI_LIMIT)
    said["out"] = re.sub(r"<supported_clocks>.*?</supported_clocks>", "", said["out"], flags=re.S)
    return said


def _each(end: float) -> Dict[str, Any]:
    """Every card asked alone, as far as the time goes: a card that hangs the tool costs its own deadline."""
    found = {}
    for device in pci():
        left = end - time.monotonic()
        if device["class"].startswith("0x03") and left > 0:
            found[device["address"]] = _query(["-i", device["address"].upper()], min(left, CARD_DEADLINE_S))
    return found


def pci() -> List[Dict[str, str]]:
    """NVIDIA's devices on the PCI bus, whether a driver answers for them or not."""
    found = []
    for path in sorted(glob.glob("/sys/bus/pci/devices/*")):
        if read_text(path + "/vendor", 16).strip() == "0x10de":
            found.append(
                {
                    "address": os.path.basename(path),
                    "device": read_text(path + "/device", 16).strip(),
                    "class": read_text(path + "/class", 16).strip(),
                }
            )
    return found


def loaded() -> Dict[str, Any]:
    """The loaded driver's own words, and each loaded module's version ('' when the kernel does not tell)."""
    names = {
        line.split()[0] for line in read_text("/proc/modules", 256 * 1024).splitlines() if line.startswith("nvidia")
    }
    names |= {name for name in MODULES if os.path.isdir("/sys/module/" + name)}
    return {
        "proc_version": read_text("/proc/driver/nvidia/version", 4096),
        "modules": {name: read_text("/sys/module/%s/version" % name, 128).strip() for name in sorted(names)},
    }


def on_disk() -> Dict[str, Dict[str, Dict[str, str]]]:
    """{kernel: {module: {version, file}}} for every kernel that has modules, read from the files themselves."""
    files = [path for kernel in glob.glob("/lib/modules/*") for path in _module_files(kernel)]
    result: Dict[str, Dict[str, Dict[str, str]]] = {os.path.basename(path): {} for path in glob.glob("/lib/modules/*")}
    for record in _modinfo(files):
        path = record.get("filename", "")
        parts = path.split("/")
        if len(parts) > 3 and parts[3] in result:
            result[parts[3]][gpuchange_boot.module_name(path)] = {"version": record.get("version", ""), "file": path}
    return result


def _module_files(kernel: str) -> List[str]:
    found = []
    for place in MODULE_PLACES:
        for top in glob.glob(os.path.join(kernel, place)):
            for directory, _, names in os.walk(top):
                found += [os.path.join(directory, name) for name in names if re.match(r"nvidia[\w-]*\.ko", name)]
    return sorted(found)


def _modinfo(files: List[str]) -> List[Dict[str, str]]:
    """modinfo's records; fields that occur more than once keep their first value."""
    if not files:
        return []
    records: List[Dict[str, str]] = []
    for line in run(["modinfo", *files], 10.0, 1024 * 1024)["out"].splitlines():
        name, colon, value = line.partition(":")
        if name == "filename":
            records.append({})
        if colon and records:
            records[-1].setdefault(name.strip(), value.strip())
    return records


def cuda() -> Dict[str, Any]:
    """Every toolkit with its own version file, every hop of the default link, alternatives' selection, every nvcc."""
    found = {path for place in TOOLKITS for path in glob.glob(place) if os.path.isdir(path)}
    homes = sorted(path for path in found if not os.path.islink(path))
    compilers = [path for path in ("/usr/local/bin/nvcc", "/usr/bin/nvcc") if not _inside(path, homes)]
    compilers += [home + "/bin/nvcc" for home in homes]
    return {
        "toolkits": {
            home: {"json": read_text(home + "/version.json"), "txt": read_text(home + "/version.txt", 1024)}
            for home in homes
        },
        "link": link_hops("/usr/local/cuda") if os.path.lexists("/usr/local/cuda") else [],
        "alternatives": run(["update-alternatives", "--query", "cuda"], 5.0)["out"],
        "nvcc": {path: run([path, "--version"], 5.0, 4096)["out"] for path in compilers if os.access(path, os.X_OK)},
    }


def _inside(path: str, homes: List[str]) -> bool:
    real = os.path.realpath(path)
    return any(real.startswith(home + "/") for home in homes)


def libraries(stem: str) -> List[Dict[str, str]]:
    """Copies of a shared library as {path, real}: the version stands in the real file's name."""
    found = {path for place in LIBRARIES for path in glob.glob("%s/%s.so*" % (place, stem))}
    found |= set(_picks(_loader(stem + ".so")))
    return [{"path": path, "real": os.path.realpath(path)} for path in sorted(found) if os.path.exists(path)]


def cudnn() -> Dict[str, Any]:
    headers = {
        path for place in HEADERS for path in glob.glob(place + "/cudnn*version*.h") + glob.glob(place + "/cudnn.h")
    }
    loader = _loader("libcudnn.so")
    return {
        "libraries": libraries("libcudnn"),
        "loader": loader,
        "picks": [os.path.realpath(path) for path in _picks(loader)],
        "headers": {path: defines(read_text(path, 256 * 1024), "CUDNN_") for path in sorted(headers)},
        "wheels": sorted(path for place in PYTHONS for path in glob.glob(place + "/nvidia_cudnn_*.dist-info"))[:64],
    }


def _loader(stem: str) -> List[str]:
    """Lines of the dynamic loader's cache for a library, in the order in which it would pick."""
    text = run(["ldconfig", "-p"], 5.0, 1024 * 1024)["out"]
    return [line.strip() for line in text.splitlines() if line.strip().startswith(stem)]


def _picks(loader: List[str]) -> List[str]:
    """The files that lines of the loader's cache lead to, this machine's own kind only, in their order."""
    native = [line for line in loader if "x86-64" in line or "AArch64" in line or "," not in line]
    return [line.rpartition(" => ")[2] for line in native]


def defines(text: str, prefix: str) -> str:
    """The lines of a header that give numbers to names with this prefix."""
    return "\n".join(re.findall(r"^#define\s+%s\w+\s+\d+\s*$" % prefix, text, flags=re.M)[:20])


def nccl() -> Dict[str, Any]:
    return {"libraries": libraries("libnccl")}


def userspace() -> Dict[str, Any]:
    """The driver's own libraries, whoever installed them: {stem: copies}, and what the loader would pick of each."""
    stems = ("libcuda", "libnvidia-ml")
    return {stem: {"copies": libraries(stem), "loader": _loader(stem + ".so.1")} for stem in stems}


def boot() -> Dict[str, Any]:
    """{kernel, initramfs}: what the next boot takes."""
    kernel = gpuchange_boot.boot_kernel()
    return {"kernel": kernel, "initramfs": gpuchange_boot.initramfs(kernel)}


def fabric_manager() -> Dict[str, Any]:
    """Its program's version, its unit's state, and the unit's last words where it has failed."""
    said = run(["nv-fabricmanager", "--version"], 5.0, 4096)
    state = run(["systemctl", "is-active", FABRIC_UNIT], 5.0, 256)["out"].strip()
    words = _last_words(FABRIC_UNIT) if state in ("failed", "activating") else ""
    return {"rc": said["rc"], "out": said["out"], "err": said["err"], "active": state, "words": words}


def _last_words(unit: str) -> str:
    out = run(["journalctl", "-u", unit, "-n", "5", "-o", "cat", "--no-pager", "-q"], 5.0, 8192)["out"]
    return " | ".join(out.splitlines())[-1024:]


def container_toolkit() -> Dict[str, Any]:
    said = run(["nvidia-ctk", "--version"], 5.0, 4096)
    present = sorted(path for pattern in TOOLKIT_FILES for path in glob.glob(pattern) if os.path.isfile(path))[:64]
    return {
        "out": said["out"],
        "config": {path: hashlib.sha256(read_bytes(path, 1024 * 1024)).hexdigest() for path in present},
    }


def dkms() -> Dict[str, Any]:
    said = run(["dkms", "status"], 10.0)
    return {**{key: said[key] for key in ("rc", "out", "err", "hung")}, "leftovers": gpuchange_dkms.leftovers()}


def apt_history() -> str:
    """The last entries of apt's history that touch NVIDIA packages: who changed the libraries, and when.

    The log of this month may have begun yesterday: the one before it belongs to it.
    """
    entries = [
        entry for path in HISTORIES for entry in _log(path).split("\n\n") if re.search("nvidia|cuda|cudnn", entry)
    ]
    return "\n\n".join(entry.strip()[:2048] for entry in entries[-6:])


def _log(path: str) -> str:
    data = read_bytes(path, 1024 * 1024)
    if path.endswith(".gz"):
        unpacker = zlib.decompressobj(31)  # 31: with gzip's own header
        try:
            data = unpacker.decompress(data, 8 * 1024 * 1024)
        except zlib.error:
            return ""
    return data.decode("utf-8", "replace")
