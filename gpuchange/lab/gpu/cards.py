"""The cards of one lab host: what /etc/gpuchange-lab/cards.json says, the only description of its GPUs."""

from __future__ import annotations

import hashlib
import uuid
from typing import Any

MODEL: dict[str, Any] = {
    "name": "NVIDIA H100 80GB HBM3",
    "pci_device": "2330",
    "pci_subsystem": "16c1",
    "compute_capability": "9.0",
    "vbios": "96.00.74.00.11",
    "memory_mib": 81559,
    "ecc": "Enabled",
    "mig": "Disabled",
    "persistence": "Enabled",
    "link_gen": 5,
    "link_width": 16,
    "link_gen_max": 5,
    "link_width_max": 16,
    "power_limit_w": 700.0,
    "power_draw_w": 69.5,
    "temperature_c": 31,
    "clock_sm_mhz": 345,
    "clock_mem_mhz": 2619,
    "clock_sm_max_mhz": 1980,
    "clock_mem_max_mhz": 2619,
}
HEALTHY: dict[str, Any] = {"lost": False, "wrong_values": False, "slow": 1.0}
"""Health of one card: fallen off the bus, computes wrong values, factor on every operation's time."""

SLOTS = ("1b", "43", "52", "61", "9d", "c3", "d1", "df")
"""PCI buses of the eight cards of an HGX H100 board."""


def default_cards(host: str, count: int) -> dict[str, Any]:
    """The description of `count` (1 to 8) healthy cards; the same host name always gets the same cards."""
    if not 1 <= count <= len(SLOTS):
        raise ValueError(f"a lab host has 1 to {len(SLOTS)} cards, not {count}")
    return {"format": 1, "host": host, "cards": [_card(host, index) for index in range(count)]}


def _card(host: str, index: int) -> dict[str, Any]:
    seed = hashlib.sha256(f"{host}/{index}".encode()).digest()
    serial = f"16{int.from_bytes(seed[16:21], 'big') % 10**11:011d}"
    return _healthy(seed, serial, SLOTS[index], index)


def another_card(serial: str, bus: str) -> dict[str, Any]:
    """A healthy card with this serial for the slot at PCI bus `bus`; the same serial always gets the same UUID."""
    return _healthy(hashlib.sha256(f"serial/{serial}".encode()).digest(), serial, bus, 0)


def _healthy(seed: bytes, serial: str, bus: str, minor: int) -> dict[str, Any]:
    name = f"GPU-{uuid.UUID(bytes=seed[:16], version=4)}"
    return MODEL | {"uuid": name, "serial": serial, "pci": f"00000000:{bus.upper()}:00.0", "minor": minor} | HEALTHY
