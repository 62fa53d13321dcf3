"""What the kernel log says of GPUs: Xid reports, and the losses that newer drivers tell without an Xid. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from gpuchange.checks.slots import bus_id

Kind = Literal["xid", "lost", "probe_failed", "init_failed", "api_mismatch"]

XID_MEANS: dict[int, str] = {
    13: "graphics engine exception",
    31: "memory page fault of a program",
    43: "a program's channel was stopped",
    45: "a program's channels were cleaned up",
    48: "double-bit memory error",
    61: "internal micro-controller breakpoint",
    62: "internal micro-controller halt",
    63: "memory row remapped or page retired",
    64: "memory row could not be remapped",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    92: "high rate of single-bit memory errors",
    94: "contained memory error",
    95: "uncontained memory error",
    109: "context switch timed out",
    110: "security fault",
    119: "GSP did not answer",
    120: "GSP error",
    140: "unrecovered memory error",
    154: "recovery action needed",
}
"""From NVIDIA's table of Xid errors (docs.nvidia.com/deploy/xid-errors); a number not listed counts all the same."""

_HEAD = re.compile(r"NVRM:\s?")
_XID = re.compile(r"Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)(?:, )?(.*)")
_PCI = re.compile(r"\b([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7])\b")
_CONTINUES = re.compile(r"\s*(\(PCI ID|fallen off the bus|installed in this system)")
_BOOT = re.compile(r"^-- (Boot|Reboot)\b")
_TEXTS: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    ("lost", re.compile(r"fallen off the bus|GPU is lost", re.I)),
    ("probe_failed", re.compile(r"probe routine failed|probe routine was not called", re.I)),
    ("init_failed", re.compile(r"RmInitAdapter failed|rm_init_adapter failed", re.I)),
    ("api_mismatch", re.compile(r"API mismatch", re.I)),
)


@dataclass(frozen=True)
class Event:
    """One thing the kernel said. `pci` is sysfs's spelling, "" if the message names no card."""

    kind: Kind
    pci: str
    text: str
    xid: int | None = None

    @property
    def sentence(self) -> str:
        where = f"GPU {self.pci}" if self.pci else "a GPU"
        if self.kind == "xid":
            means = XID_MEANS.get(self.xid or 0, "")
            return f"{where}: Xid {self.xid}" + (f" ({means})" if means else f": {self.text}")
        if self.kind == "lost":
            return f"{where} fell off the bus (no Xid line)"
        return f"{where}: {self.text}" if self.pci else self.text


def parse(text: str) -> tuple[Event, ...]:
    """The events of the last boot in `text`, as they came; the same card's loss told in several ways counts once."""
    events: list[Event] = []
    for message in _messages(_this_boot(text)):
        event = _event(message)
        if event and event not in events and not _told_already(event, events):
            events.append(event)
    return tuple(events)


def bad(events: tuple[Event, ...], accepted: frozenset[int] = frozenset()) -> tuple[str, ...]:
    """Sentences of the events that speak against a card; Xids in `accepted` do not."""
    return tuple(event.sentence for event in events if event.xid not in accepted)


def _this_boot(text: str) -> list[str]:
    lines = text.splitlines()
    starts = [index for index, line in enumerate(lines) if _BOOT.match(line)]
    return lines[starts[-1] + 1 :] if starts else lines


def _messages(lines: list[str]) -> Iterator[str]:
    """NVRM messages without stamps, continuation lines joined to what they continue."""
    current = ""
    for line in lines:
        head = _HEAD.search(line)
        if not head:
            continue
        body = line[head.end() :]
        if current and ((line[:1].isspace() and _unfinished(current)) or _CONTINUES.match(body)):
            current = f"{current.rstrip()} {body.strip()}"
            continue
        if current:
            yield current
        current = body.strip()
    if current:
        yield current


def _unfinished(message: str) -> bool:
    return "Xid (" not in message and not message.rstrip().endswith((".", "!"))


def _event(message: str) -> Event | None:
    xid = _XID.search(message)
    if xid:
        slot = xid[1] if "." in xid[1] else f"{xid[1]}.0"
        return Event("xid", bus_id(slot), xid[3].strip(), int(xid[2]))
    found = next((kind for kind, pattern in _TEXTS if pattern.search(message)), None)
    if found is None:
        return None
    pci = _PCI.search(message)
    return Event(found, bus_id(pci[1]) if pci else "", message)


def _told_already(event: Event, events: list[Event]) -> bool:
    """A loss that is told both as Xid 79 and in words."""
    losses = (seen.pci for seen in events if seen.kind == "lost" or seen.xid == 79)
    return event.kind == "lost" and event.pci in losses
