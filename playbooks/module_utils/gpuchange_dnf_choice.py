"""Which RPMs make up the stack that a plan asks for: pure functions over what is offered and what is installed.

NVIDIA's RPMs keep their names from version to version, so the shape that a host has is carried over by name.
"""

from __future__ import annotations

import re
from typing import Any, Dict, List

from ansible.module_utils.gpuchange_rpm import upstream

Offer = Dict[str, Dict[str, Dict[str, Any]]]
"""{name: {version: record}}"""

DRIVER_FAMILY = re.compile(
    r"nvidia-(driver|kmod|modprobe|persistenced|settings|xconfig|libXNVCtrl|fabric|fabricmanager|imex|open|libs).*"
    r"|(a?kmod|xorg-x11-(drv-)?)-?nvidia.*|cuda-drivers.*|libnvidia-(?!container).*|nvlsm|libnvsdm.*"
)
DRIVER_CORE = re.compile(r"nvidia-(driver|open|kmod-common).*|a?kmod-nvidia.*|cuda-drivers.*|xorg-x11-drv-nvidia.*")
DRIVER_MAINS = ("cuda-drivers", "nvidia-open", "nvidia-driver-cuda", "nvidia-driver")
DRIVER_VERSION = re.compile(r"\d{3}\.\d+(\.\d+)?")
TOOLKIT = re.compile(r"nvidia-container-toolkit.*|libnvidia-container.*")
PREFIXES = ("nvidia", "kmod-nvidia", "akmod-nvidia", "cuda", "libnvidia", "libcudnn", "cudnn", "libnccl", "xorg-x11",
            "nvlsm", "libnvsdm")  # fmt: skip


def matches(wanted: str, version: str) -> bool:
    bare = upstream(version)
    return wanted in (version, version.rpartition(":")[2], bare) or bare.startswith((wanted + ".", wanted + "+"))


class RpmChoice:
    """The packages to install at exact versions, and what stands in the way."""

    def __init__(self) -> None:
        self.install: Dict[str, str] = {}
        self.mains: Dict[str, str] = {}
        self.problems: List[str] = []

    def take(self, offer: Offer, name: str, wanted: str) -> bool:
        found = sorted(version for version in offer.get(name, {}) if matches(wanted, version))
        if len(found) == 1:
            self.install[name] = found[0]
            return True
        if found:
            said = "%s %s is ambiguous: %s are offered; write the one that is meant in the plan"
            self.problems.append(said % (name, wanted, ", ".join(found)))
            return False
        others = ", ".join(sorted(offer.get(name, {}))) or "none at all"
        self.problems.append("%s %s is not offered by the host's repositories; offered: %s" % (name, wanted, others))
        return False


def choose(wanted: Dict[str, str], offer: Offer, installed: Dict[str, str]) -> RpmChoice:
    """The packages for `wanted` ({driver, cuda, cudnn, nccl, container_toolkit}; what is absent stays as it is)."""
    choice = RpmChoice()
    for component, select in (
        ("driver", _driver),
        ("cuda", _cuda),
        ("cudnn", _cudnn),
        ("nccl", _nccl),
        ("container_toolkit", _container_toolkit),
    ):
        if wanted.get(component):
            select(choice, wanted, offer, installed)
    return choice


def driver_numbers(installed: Dict[str, str]) -> Dict[str, List[str]]:
    """{upstream version: core packages of it}; more than one is a mixed, broken set."""
    found: Dict[str, List[str]] = {}
    for name, version in sorted(installed.items()):
        if DRIVER_CORE.fullmatch(name) and DRIVER_VERSION.fullmatch(upstream(version)):
            found.setdefault(upstream(version), []).append("%s %s" % (name, version))
    return found


def _driver(choice: RpmChoice, wanted: Dict[str, str], offer: Offer, installed: Dict[str, str]) -> None:
    numbers, version = driver_numbers(installed), wanted["driver"]
    if len(numbers) > 1:
        table = "; ".join("%s: %s" % (number, ", ".join(rows)) for number, rows in numbers.items())
        choice.problems.append("the installed driver is a mix of versions (%s); mend it first" % table)
        return
    if not numbers:
        main = next((name for name in DRIVER_MAINS if _has(offer, name, version)), DRIVER_MAINS[0])
        if choice.take(offer, main, version):
            choice.mains["driver"] = main
        return
    (number,) = numbers
    names = [
        name for name, have in sorted(installed.items()) if DRIVER_FAMILY.fullmatch(name) and upstream(have) == number
    ]
    taken = [name for name in names if choice.take(offer, name, version)]
    core = [name for name in taken if DRIVER_CORE.fullmatch(name)]
    if core:
        choice.mains["driver"] = next((name for name in DRIVER_MAINS if name in core), core[0])


def _has(offer: Offer, name: str, wanted: str) -> bool:
    return any(matches(wanted, version) for version in offer.get(name, {}))


def _cuda(choice: RpmChoice, wanted: Dict[str, str], offer: Offer, _installed: Dict[str, str]) -> None:
    parts = wanted["cuda"].split(".")
    if len(parts) < 2:
        choice.problems.append('cuda %s names no release: write the version, for example "12.8.1"' % wanted["cuda"])
        return
    name = "cuda-toolkit-%s-%s" % (parts[0], parts[1])
    if choice.take(offer, name, wanted["cuda"]):
        choice.mains["cuda"] = name


def _library(choice: RpmChoice, part: str, pattern: str, wanted: str, offer: Offer, installed: Dict[str, str]) -> None:
    """The installed packages of a library at the wanted version; where none is, the first that is offered at it."""
    names = [name for name in sorted(installed) if re.fullmatch(pattern, name)]
    fresh = [name for name in sorted(offer) if re.fullmatch(pattern, name) and _has(offer, name, wanted)]
    for name in names or fresh[:1] or [part]:
        if choice.take(offer, name, wanted):
            choice.mains.setdefault(part, name)


def _cudnn(choice: RpmChoice, wanted: Dict[str, str], offer: Offer, installed: Dict[str, str]) -> None:
    major = wanted["cudnn"].partition(".")[0]
    cuda = (wanted.get("cuda") or "").partition(".")[0] or r"\d+"
    _library(choice, "cudnn", r"libcudnn%s(-\w+)?-cuda-%s" % (major, cuda), wanted["cudnn"], offer, installed)


def _nccl(choice: RpmChoice, wanted: Dict[str, str], offer: Offer, installed: Dict[str, str]) -> None:
    _library(choice, "nccl", r"libnccl(-devel)?", wanted["nccl"], offer, installed)


def _container_toolkit(choice: RpmChoice, wanted: Dict[str, str], offer: Offer, installed: Dict[str, str]) -> None:
    version = wanted["container_toolkit"]
    names = [name for name in sorted(installed) if TOOLKIT.fullmatch(name)] or ["nvidia-container-toolkit"]
    for name in names:
        choice.take(offer, name, version)
    if "nvidia-container-toolkit" in choice.install:
        choice.mains["container_toolkit"] = "nvidia-container-toolkit"
