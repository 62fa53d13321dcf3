"""Which machine a name means, and whether its cards are still the cards that they were."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

from gpuchange.checks.cards import Card


def same_machines(facts: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """{host: why it is refused} from their machine_id and boot_id: two names for one machine, cloned machine-ids."""
    groups: dict[str, list[str]] = defaultdict(list)
    for host in sorted(facts):
        machine = str(facts[host].get("machine_id") or "")
        if machine:
            groups[machine].append(host)
    return {
        host: _why(host, [other for other in hosts if other != host], machine, facts)
        for machine, hosts in groups.items()
        if len(hosts) > 1
        for host in hosts
    }


def _why(host: str, others: list[str], machine: str, facts: Mapping[str, Mapping[str, Any]]) -> str:
    boot = facts[host].get("boot_id")
    if boot and any(facts[other].get("boot_id") == boot for other in others):
        return f"{' and '.join(sorted([host, *others]))} are the same machine (machine-id {machine})"
    return (
        f"{' and '.join(sorted([host, *others]))} carry the same machine-id {machine} but are not the same machine: "
        f"give each its own (systemd-machine-id-setup)"
    )


def moved(before: Mapping[str, Any], after: Mapping[str, Any], may_change: Collection[str] = ()) -> tuple[str, ...]:
    """What of the machine's identity is not as it was: the machine-id never may change."""
    was, now = before.get("machine_id"), after.get("machine_id")
    return (f"machine-id should be {was}, is {now}: this is another machine",) if was and was != now else ()


def compare_cards(
    before: Collection[Card], after: Collection[Card], on_bus: Collection[str], may_change: Collection[str] = ()
) -> tuple[str, ...]:
    """Cards that are missing, new or other ones, in words. `on_bus`: addresses that sysfs lists now.

    `may_change` may hold gpu_uuid, serial: a card in the same slot with another uuid or serial is then no finding.
    """
    was, now = ({card.bus_id: card for card in cards} for cards in (before, after))
    moved_to = {card.uuid: card.bus_id for card in after if card.uuid}
    missing = [_missing(card, moved_to, on_bus) for slot, card in was.items() if slot not in now]
    new = [f"card {card.uuid} at {slot} was not there before" for slot, card in now.items() if slot not in was]
    other = [
        f"card at {slot}: {field} should be {getattr(was[slot], field)}, is {getattr(card, field)}"
        for slot, card in now.items()
        if slot in was
        for field, name in (("uuid", "gpu_uuid"), ("serial", "serial"), ("name", "gpu_name"))
        if name not in may_change and getattr(was[slot], field) != getattr(card, field)
    ]
    head = [f"{len(now)} of {len(was)} GPUs"] if missing else []
    return tuple(head + missing + new + other)


def _missing(card: Card, moved_to: Mapping[str, str], on_bus: Collection[str]) -> str:
    if card.uuid and card.uuid in moved_to:
        return f"{card.uuid} moved from {card.bus_id} to {moved_to[card.uuid]}"
    where = "on the PCI bus but not initialised" if card.bus_id in on_bus else "not on the PCI bus"
    return f"missing {card.uuid or card.name or 'a card'} ({card.bus_id}), {where}"
