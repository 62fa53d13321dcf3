"""The cards as `nvidia-smi -q -x` tells them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree

from pydantic import BaseModel, ConfigDict


class Mig(BaseModel):
    model_config = ConfigDict(frozen=True)

    profile: str = ""
    uuid: str = ""


class Card(BaseModel):
    """One physical card. Text as the tool prints it; None where it prints N/A or nothing."""

    model_config = ConfigDict(frozen=True)

    uuid: str | None = None
    serial: str | None = None
    bus_id: str = ""
    name: str | None = None
    vbios: str | None = None
    ecc: str | None = None
    mig_mode: str | None = None
    persistence: str | None = None
    power_limit: str | None = None
    link_gen: str | None = None
    link_width: str | None = None
    link_gen_max: str | None = None
    link_width_max: str | None = None
    memory: str | None = None
    mig: tuple[Mig, ...] = ()


class Smi(BaseModel):
    """What nvidia-smi said: `ok` only when it answered for all cards; `why` says what it said instead."""

    model_config = ConfigDict(frozen=True)

    ok: bool = False
    why: str = ""
    driver: str | None = None
    cuda: str | None = None
    """The newest CUDA that the driver can carry; not a toolkit version."""
    cards: tuple[Card, ...] = ()
    dead: tuple[str, ...] = ()
    """Bus ids of cards that do not answer."""


_PATHS = {
    "uuid": ("uuid",),
    "serial": ("serial",),
    "name": ("product_name",),
    "vbios": ("vbios_version",),
    "ecc": ("ecc_mode/current_ecc",),
    "mig_mode": ("mig_mode/current_mig",),
    "persistence": ("persistence_mode",),
    "power_limit": (
        "gpu_power_readings/current_power_limit",
        "power_readings/power_limit",
        "gpu_power_readings/power_limit",
    ),
    "link_gen": ("pci/pci_gpu_link_info/pcie_gen/current_link_gen",),
    "link_width": ("pci/pci_gpu_link_info/link_widths/current_link_width",),
    "link_gen_max": ("pci/pci_gpu_link_info/pcie_gen/max_link_gen",),
    "link_width_max": ("pci/pci_gpu_link_info/link_widths/max_link_width",),
    "memory": ("fb_memory_usage/total",),
}
_DEAD = re.compile(r"(?:handle for GPU|GPU at|GPU)\s*([0-9A-Fa-f]{1,8}:[0-9A-Fa-f]{1,2}:[0-9A-Fa-f]{1,2}\.[0-7])", re.I)
_MISMATCH = "Driver/library version mismatch"


def bus_id(text: str) -> str:
    """One spelling for a PCI address, sysfs's: 00000000:3B:00.0, 000:3b:00.0 and 0000:3b:00.0 are the same slot."""
    found = re.fullmatch(r"\s*(?:([0-9A-Fa-f]{1,8}):)?([0-9A-Fa-f]{1,2}):([0-9A-Fa-f]{1,2})\.([0-7])\s*", text)
    if not found:
        return text.strip().lower()
    domain, bus, device, function = (int(part or "0", 16) for part in found.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function}"


def parse(said: Mapping[str, Any]) -> Smi:
    """Read {rc, out, err, hung, cut}. Never raises: what cannot be read is not `ok`."""
    text, both = str(said.get("out") or ""), f"{said.get('out') or ''}\n{said.get('err') or ''}"
    dead = tuple(sorted({bus_id(found) for found in _DEAD.findall(both)})) if said.get("rc") != 0 else ()
    why = _trouble(said, both)
    if why:
        return Smi(why=why, dead=dead)
    try:
        root = _root(text)
    except (ElementTree.ParseError, ValueError) as error:
        return Smi(why=f"nvidia-smi's XML cannot be read: {error}")
    cards = tuple(_card(node) for node in root.iter("gpu"))
    return Smi(ok=True, driver=_text(root, "driver_version"), cuda=_text(root, "cuda_version"), cards=cards)


def _trouble(said: Mapping[str, Any], both: str) -> str:
    if said.get("hung"):
        return (
            f"nvidia-smi did not answer within {said.get('seconds', 0):.0f} s" if _number(said) else "nvidia-smi hangs"
        )
    if said.get("cut"):
        return "nvidia-smi said more than we read"
    if said.get("rc") != 0:
        first = next((line.strip() for line in both.splitlines() if line.strip()), "nothing")
        return f"nvidia-smi ended with {said.get('rc')}: {first[:200]}"
    return ""


def _number(said: Mapping[str, Any]) -> bool:
    return isinstance(said.get("seconds"), int | float)


def is_mismatch(smi: Smi) -> bool:
    return _MISMATCH in smi.why


def _root(text: str) -> ElementTree.Element:
    if "<!ENTITY" in text:
        raise ValueError("it declares entities")
    return ElementTree.fromstring(text)


def _text(node: ElementTree.Element, *paths: str) -> str | None:
    for path in paths:
        value = (node.findtext(path) or "").strip()
        if value and not value.strip("[]").upper().startswith("N/A"):
            return value
    return None


def _card(node: ElementTree.Element) -> Card:
    fields: dict[str, Any] = {name: _text(node, *paths) for name, paths in _PATHS.items()}
    mig = tuple(
        Mig(profile=_text(part, "name", "gpu_instance_id") or "", uuid=_text(part, "uuid") or "")
        for part in node.iterfind("mig_devices/mig_device")
    )
    return Card(bus_id=bus_id(node.get("id") or _text(node, "pci/pci_bus_id") or ""), mig=mig, **fields)
