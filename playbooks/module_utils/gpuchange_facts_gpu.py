"""Facts of the GPU stack: driver, cards, CUDA, cuDNN, fabric manager, container toolkit. Read-only."""

from __future__ import annotations

import glob
import hashlib
import os
import re
from typing import Any, Dict, List

from ansible.module_utils.gpuchange_look import link_hops, read_bytes, read_text, run

SMI_LIMIT = 2 * 1024 * 1024
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
)
HEADERS = ("/usr/include", "/usr/include/*-linux-gnu", "/usr/local/cuda*/include", "/usr/local/include")
TOOLKIT_FILES = ("/etc/nvidia-container-runtime/config.toml", "/etc/docker/daemon.json", "/etc/containerd/config.toml")


def smi(deadline_s: float = 20.0) -> Dict[str, Any]:
    """`nvidia-smi -q -x`, raw, without the list of supported clocks: it is most of the text and says nothing here."""
    said = run(["nvidia-smi", "-q", "-x"], deadline_s, SMI_LIMIT)
    said["out"] = re.sub(r"<supported_clocks>.*?</supported_clocks>", "", said["out"], flags=re.S)
    return said


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
            name = os.path.basename(path).split(".ko")[0].replace("-", "_")
            result[parts[3]][name] = {"version": record.get("version", ""), "file": path}
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
    homes = sorted(path for path in glob.glob("/usr/local/cuda*") if os.path.isdir(path) and not os.path.islink(path))
    compilers = ["/usr/bin/nvcc", "/usr/local/bin/nvcc"] + [home + "/bin/nvcc" for home in homes]
    return {
        "toolkits": {
            home: {"json": read_text(home + "/version.json"), "txt": read_text(home + "/version.txt", 1024)}
            for home in homes
        },
        "link": link_hops("/usr/local/cuda") if os.path.lexists("/usr/local/cuda") else [],
        "alternatives": run(["update-alternatives", "--query", "cuda"], 5.0)["out"],
        "nvcc": {path: run([path, "--version"], 5.0, 4096)["out"] for path in compilers if os.access(path, os.X_OK)},
    }


def libraries(stem: str) -> List[Dict[str, str]]:
    """Copies of a shared library as {path, real}: the version stands in the real file's name."""
    found = {path for place in LIBRARIES for path in glob.glob("%s/%s.so*" % (place, stem))}
    return [{"path": path, "real": os.path.realpath(path)} for path in sorted(found)]


def cudnn() -> Dict[str, Any]:
    headers = {
        path for place in HEADERS for path in glob.glob(place + "/cudnn*version*.h") + glob.glob(place + "/cudnn.h")
    }
    return {
        "libraries": libraries("libcudnn"),
        "loader": _loader("libcudnn.so"),
        "headers": {path: _defines(path, "CUDNN_") for path in sorted(headers)},
        "wheels": sorted(glob.glob("/srv/*/lib/python*/site-packages/nvidia_cudnn_*.dist-info"))[:64],
    }


def _loader(stem: str) -> List[str]:
    """Lines of the dynamic loader's cache for a library, in the order in which it would pick."""
    text = run(["ldconfig", "-p"], 5.0, 1024 * 1024)["out"]
    return [line.strip() for line in text.splitlines() if line.strip().startswith(stem)]


def _defines(path: str, prefix: str) -> str:
    return "\n".join(re.findall(r"^#define\s+%s\w+\s+\d+\s*$" % prefix, read_text(path, 256 * 1024), flags=re.M)[:20])


def nccl() -> Dict[str, Any]:
    return {"libraries": libraries("libnccl")}


def fabric_manager() -> Dict[str, Any]:
    said = run(["nv-fabricmanager", "--version"], 5.0, 4096)
    return {"rc": said["rc"], "out": said["out"], "err": said["err"]}


def container_toolkit() -> Dict[str, Any]:
    said = run(["nvidia-ctk", "--version"], 5.0, 4096)
    present = [path for path in TOOLKIT_FILES if os.path.isfile(path)]
    return {
        "out": said["out"],
        "config": {path: hashlib.sha256(read_bytes(path, 1024 * 1024)).hexdigest() for path in present},
    }


def dkms() -> Dict[str, Any]:
    said = run(["dkms", "status"], 10.0)
    return {key: said[key] for key in ("rc", "out", "err", "hung")}


def apt_history() -> str:
    """The last entries of apt's history that touch NVIDIA packages: who changed the libraries, and when."""
    text = read_text("/var/log/apt/history.log", 1024 * 1024)
    entries = [entry for entry in text.split("\n\n") if "nvidia" in entry or "cuda" in entry or "cudnn" in entry]
    return "\n\n".join(entry[:2048] for entry in entries[-3:])
