"""The cards as `nvidia-smi -q -x` tells them, from driver 470 on; MIG names and places as `-L` and `mig -lgi` do."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

from pydantic import BaseModel, ConfigDict

from gpuchange.checks import smi_text
from gpuchange.checks.slots import bus_id


class Mig(BaseModel):
    """A MIG device. The XML knows neither its profile nor its UUID; without `-L` its memory names it."""

    model_config = ConfigDict(frozen=True)

    profile: str = ""
    uuid: str = ""
    instance: str = ""
    compute: str = ""
    memory: str = ""
    place: str = ""
    """START:SIZE in memory slices, where `mig -lgi` told it."""

    @property
    def label(self) -> str:
        return self.profile or self.memory or "?"


class Card(BaseModel):
    """One physical card, as the tool prints it; None where it prints N/A or nothing. `sick`: why it does not answer."""

    model_config = ConfigDict(frozen=True)

    uuid: str | None = None
    serial: str | None = None
    bus_id: str = ""
    name: str | None = None
    vbios: str | None = None
    ecc: str | None = None
    ecc_pending: str | None = None
    mig_mode: str | None = None
    mig_pending: str | None = None
    persistence: str | None = None
    power_limit: str | None = None
    compute_mode: str | None = None
    clocks: str | None = None
    """The application clocks, GRAPHICS/MEMORY; newer drivers have none. Locked clocks cannot be read of any driver."""
    link_gen: str | None = None
    link_width: str | None = None
    link_gen_max: str | None = None
    link_width_max: str | None = None
    memory: str | None = None
    mig: tuple[Mig, ...] = ()
    sick: str = ""

    @property
    def geometry(self) -> str:
        """`7x1g.5gb`, `1x3g.20gb+2x1g.5gb` or `none`."""
        counted = Counter(device.label for device in self.mig)
        return "+".join(f"{times}x{label}" for label, times in sorted(counted.items(), reverse=True)) or "none"


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


_LINK = "pci/pci_gpu_link_info"
_PATHS = {
    "uuid": ("uuid",),
    "serial": ("serial",),
    "name": ("product_name",),
    "vbios": ("vbios_version",),
    "ecc": ("ecc_mode/current_ecc",),
    "ecc_pending": ("ecc_mode/pending_ecc",),
    "mig_mode": ("mig_mode/current_mig",),
    "mig_pending": ("mig_mode/pending_mig",),
    "persistence": ("persistence_mode",),
    "power_limit": (
        "gpu_power_readings/current_power_limit",
        "gpu_power_readings/power_limit",
        "power_readings/current_power_limit",
        "power_readings/power_limit",
    ),
    "compute_mode": ("compute_mode",),
    "link_gen": (f"{_LINK}/pcie_gen/current_link_gen",),
    "link_width": (f"{_LINK}/link_widths/current_link_width",),
    "link_gen_max": (f"{_LINK}/pcie_gen/max_link_gen",),
    "link_width_max": (f"{_LINK}/link_widths/max_link_width",),
    "memory": ("fb_memory_usage/total",),
}
_DRIVER = ("kmd_version", "driver_version")
_CUDA = ("cuda_umd_version", "cuda_version")
"""Names since driver 610, and before it."""
_VITAL = (
    "uuid",
    "product_name",
    "fb_memory_usage/total",
    "temperature/gpu_temp",
    "clocks/sm_clock",
    "utilization/gpu_util",
)
"""Where even a vague `Unknown Error` means that the card does not answer; of a fan it does not."""
_VAGUE = frozenset({smi_text.SICK["UNKNOWN ERROR"], smi_text.SICK["ERR!"]})
_DEAD = re.compile(r"(?:handle for GPU|GPU at|GPU)\s*([0-9A-Fa-f]{1,8}:[0-9A-Fa-f]{1,2}:[0-9A-Fa-f]{1,2}\.[0-7])", re.I)
_MISMATCH = "Driver/library version mismatch"


def parse(said: Mapping[str, Any]) -> Smi:
    """Read {rc, out, err, hung, cut}, and what was asked beside it: list, instances, table (texts), each ({bus: said}).

    Never raises: what cannot be read is not `ok`.
    """
    both = f"{said.get('out') or ''}\n{said.get('err') or ''}"
    dead = tuple(sorted({bus_id(found) for found in _DEAD.findall(both)})) if said.get("rc") != 0 else ()
    why = _trouble(said, both)
    if why:
        return _without(dead, tuple(_others(said.get("each"))), why) if dead else Smi(why=why)
    try:
        root = _root(str(said.get("out") or ""))
    except (ElementTree.ParseError, ValueError) as error:
        return _from_table(str(said.get("table") or ""), f"nvidia-smi's XML cannot be read: {error}")
    cards = _with_mig(tuple(map(_card, root.iter("gpu"))), said)
    sick = tuple(sorted(card.bus_id for card in cards if card.sick))
    why = _who_answers(sick, cards, "; ".join(dict.fromkeys(c.sick for c in cards if c.sick))) if sick else ""
    driver, cuda = _text(root, *_DRIVER), _text(root, *_CUDA)
    return Smi(ok=not sick, why=why, driver=driver, cuda=cuda, cards=cards, dead=sick)


def _who_answers(dead: Iterable[str], cards: Sequence[Card], why: str) -> str:
    """`GPU at 0000:0b:00.0 not responding; 3 others answer (...)`."""
    well = sum(not card.sick for card in cards)
    others = "1 other answers" if well == 1 else f"{well} others answer"
    return f"GPU at {', '.join(dead)} not responding; {others} ({why})"


def _without(dead: Sequence[str], alone: Sequence[Smi], why: str) -> Smi:
    """What the cards that answer tell when each is asked alone, where one that does not had silenced them all."""
    cards = tuple(card for smi in alone for card in smi.cards if card.bus_id not in dead)
    driver, cuda = (next((told for smi in alone if (told := getattr(smi, key))), None) for key in ("driver", "cuda"))
    return Smi(why=_who_answers(dead, cards, why), dead=tuple(dead), cards=cards, driver=driver, cuda=cuda)


def _others(each: Any) -> Iterator[Smi]:
    for said in each.values() if isinstance(each, Mapping) else ():
        if isinstance(said, Mapping):
            yield parse({**said, "each": None})


def _from_table(text: str, why: str) -> Smi:
    """What the plain table still tells where the XML is torn."""
    found = smi_text.table(text)
    cards = tuple(
        Card(
            bus_id=row.bus_id, name=row.name, persistence=row.persistence, memory=row.memory, mig_mode=row.mig_mode,
            sick=smi_text.SICK["ERR!"] if row.sick else "",
        )
        for row in found.cards
    )  # fmt: skip
    dead = tuple(sorted(card.bus_id for card in cards if card.sick))
    return Smi(why=why, driver=found.driver, cuda=found.cuda, cards=cards, dead=dead)


def _trouble(said: Mapping[str, Any], both: str) -> str:
    if said.get("hung"):
        return (
            f"nvidia-smi did not answer within {said.get('seconds', 0):.0f} s" if _number(said) else "nvidia-smi hangs"
        )
    if said.get("cut"):
        return "nvidia-smi said more than we read"
    if said.get("rc") != 0:
        first = next(
            (line.strip() for line in both.splitlines() if line.strip() and line.lstrip()[0] != "<"), "nothing"
        )
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
    return next((found for path in paths if (found := smi_text.value(node.findtext(path)))), None)


def _card(node: ElementTree.Element) -> Card:
    fields: dict[str, Any] = {name: _text(node, *paths) for name, paths in _PATHS.items()}
    clocks = [_text(node, f"applications_clocks/{name}") for name in ("graphics_clock", "mem_clock")]
    return Card(
        bus_id=bus_id(_text(node, "pci/pci_bus_id") or node.get("id") or ""),
        clocks="/".join(filter(None, clocks)) or None,
        mig=tuple(map(_mig, node.iterfind("mig_devices/mig_device"))),
        sick=_sick(node),
        **fields,
    )


def _mig(part: ElementTree.Element) -> Mig:
    return Mig(
        profile=_text(part, "name") or "",
        uuid=_text(part, "uuid") or "",
        instance=_text(part, "gpu_instance_id") or "",
        compute=_text(part, "compute_instance_id") or "",
        memory=_text(part, "fb_memory_usage/total") or "",
    )


def _sick(node: ElementTree.Element) -> str:
    """Why a card that is listed does not answer, in nvidia-smi's words; or ''."""
    clear = (smi_text.sickness(part.text or "") for part in node.iter())
    found = next((word for word in clear if word and word not in _VAGUE), "")
    vague = next((word for path in _VITAL if (word := smi_text.sickness(node.findtext(path) or ""))), "")
    action = _text(node, "gpu_recovery_action") or "None"
    return found or vague or ("" if action == "None" else f"GPU recovery action: {action}")


# ------------------------------------------------------------------------------------------------------ MIG


def _with_mig(cards: Sequence[Card], said: Mapping[str, Any]) -> tuple[Card, ...]:
    """The cards with their MIG devices' profiles and UUIDs (`-L`) and places (`mig -lgi`)."""
    if not any(card.mig for card in cards):
        return tuple(cards)
    listed = {row.uuid: row.mig for row in smi_text.listing(str(said.get("list") or ""))}
    places = {(row.gpu, row.instance): row for row in smi_text.gpu_instances(str(said.get("instances") or ""))}
    return tuple(
        card.model_copy(update={"mig": tuple(_named(index, card, listed.get(card.uuid or "", ()), places))})
        for index, card in enumerate(cards)
    )


def _named(
    index: int, card: Card, listed: Sequence[smi_text.Instance], places: Mapping[tuple[int, int], smi_text.Placed]
) -> Iterator[Mig]:
    """`-L` numbers a card's devices as the XML does; if their numbers differ, neither names the other's."""
    names = listed if len(listed) == len(card.mig) else (None,) * len(card.mig)
    for device, name in zip(card.mig, names, strict=True):
        number = int(device.instance) if re.fullmatch(r"[0-9]{1,4}", device.instance) else -1
        place = places.get((index, number))
        known = {
            "profile": device.profile or (name.profile if name else "") or (place.profile if place else ""),
            "uuid": device.uuid or (name.uuid if name else ""),
            "place": f"{place.start}:{place.size}" if place else "",
        }
        yield device.model_copy(update=known)
