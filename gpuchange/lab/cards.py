"""The cards of a lab host changed by hand: pulled, put in, swapped, with the power off as on a real one.

A card that was pulled lies on the lab's shelf and is the same card when its serial is put in again, anywhere.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuchange.errors import LabError
from gpuchange.lab.gpu import CARDS_FILE
from gpuchange.lab.gpu.cards import SLOTS, another_card

if TYPE_CHECKING:
    from gpuchange.lab.host import Host

FIELDS = frozenset({"vbios", "link_width", "link_gen", "memory_mib", "name", "uuid"})
"""What of a card may be given when it is put in: each a fault or another model."""


def cards(host: Host) -> list[dict[str, Any]]:
    """The host's cards as described, in the order of their slots."""
    return list(json.loads(_file(host).read_text())["cards"])


def pull(host: Host, slot: str) -> dict[str, Any]:
    """Take the card out of `slot` (a PCI bus, "1b", or address) and lay it on the shelf. The host must be off."""
    _powered_off(host)
    kept = cards(host)
    found = next((card for card in kept if bus(card) == _bus(slot)), None)
    if found is None:
        raise LabError(f"slot {slot} is empty", where=host.name, remedy=f"its cards: {', '.join(map(bus, kept))}")
    _write(_shelf(host), {**_shelved(host), found["serial"]: found})
    _describe(host, [card for card in kept if card is not found])
    return found


def put(host: Host, slot: str, serial: str, **fields: Any) -> dict[str, Any]:
    """Put the card with this serial into the empty `slot`: from the shelf if it lies there, else a new one.

    `fields` say what is odd about it (see FIELDS). The host must be off.
    """
    _powered_off(host)
    if _bus(slot) not in SLOTS:
        raise LabError(f"there is no slot {slot}", where=host.name, remedy=f"slots: {', '.join(SLOTS)}")
    if set(fields) - FIELDS:
        raise LabError(f"a card has no {', '.join(sorted(set(fields) - FIELDS))}", remedy=f"it has {sorted(FIELDS)}")
    kept, shelved = cards(host), _shelved(host)
    if any(bus(card) == _bus(slot) for card in kept):
        raise LabError(f"slot {slot} is not empty", where=host.name, remedy="pull the card that is in it first")
    new = another_card(serial, _bus(slot))
    card = {**shelved.get(serial, new), "pci": new["pci"], **fields}
    _write(_shelf(host), {key: other for key, other in shelved.items() if key != serial})
    _describe(host, [*kept, card])
    return card


def bus(card: dict[str, Any]) -> str:
    """The PCI bus of a card, which names its slot: 1b."""
    return str(card["pci"])[9:11].lower()


def _bus(slot: str) -> str:
    return slot.lower().rpartition(":")[0].rpartition(":")[2] if ":" in slot else slot.lower()


def _powered_off(host: Host) -> None:
    if host.status()["power"] != "off":
        raise LabError(
            "a card is pulled with the power off",
            where=host.name,
            remedy=f"gpuchange lab power --name {host.spec.name} {host.name} off",
        )


def _describe(host: Host, kept: list[dict[str, Any]]) -> None:
    ordered = sorted(kept, key=bus)
    found = json.loads(_file(host).read_text())
    _write(_file(host), {**found, "cards": [{**card, "minor": minor} for minor, card in enumerate(ordered)]})


def _file(host: Host) -> Path:
    return host.root / CARDS_FILE


def _shelf(host: Host) -> Path:
    return host.spec.directory / "shelf.json"


def _shelved(host: Host) -> dict[str, dict[str, Any]]:
    shelf = _shelf(host)
    return dict(json.loads(shelf.read_text())) if shelf.exists() else {}


def _write(path: Path, data: Any) -> None:
    draft = path.with_suffix(".new")
    draft.write_text(json.dumps(data, indent=1))
    draft.replace(path)
