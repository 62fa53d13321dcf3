#!/usr/bin/python3
"""Powers a host off so that hands can change its cards, and looks at the cards that are in it."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpuchange_card
short_description: Look at a host's cards, and power it off for a card change by hand
description:
  - Looks first. Cards that are as wanted already need no hands; else the host is powered off once a direction, by a
    host unit, and whoever calls again finds out whether it has been off since.
  - Never powers off again once an operator has confirmed, and never decides whether the cards are right.
  - With args.knock (what gpuchange_knock heard) it only passes on that the host is away, from the controller.
options:
  mode: {type: str, choices: [probe, apply, undo], required: true, description: What to do.}
  owner: {type: dict, required: true, description: "change, controller, fence, reason, ticket"}
  args:
    type: dict
    default: {}
    description: "goal ([{slot, uuid, serial, other_than}]), confirmed, generation, references, knock, arrived"
  step: {type: dict, default: {}, description: "phase, provider, direction"}
author: gpuchange
"""
EXAMPLES = "- gpuchange_card: {mode: apply, owner: '{{ gpuchange_owner }}', args: {goal: [{slot: '0000:1b:00.0'}]}}"
RETURN = "report: {type: dict, returned: always, description: 'stage, seen, references, ordered_boot, heard'}"

import re  # noqa: E402
from typing import Any, Dict, List, NoReturn  # noqa: E402

from ansible.module_utils import gpuchange_facts_gpu as gpu  # noqa: E402
from ansible.module_utils import gpuchange_facts_host as host  # noqa: E402
from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible.module_utils.gpuchange_host import (  # noqa: E402
    args_of,
    boot_id,
    direction_of,
    finish,
    mode_of,
    open_module,
    owned,
    read_json,
    save_once,
    state_path,
)
from ansible.module_utils.gpuchange_references import references  # noqa: E402
from ansible.module_utils.gpuchange_unit import host_unit  # noqa: E402

SMI_DEADLINE_S = 20.0
# The answer must be on its way before the network goes down.
POWER_OFF = ["sh", "-c", "sleep 2; systemctl poweroff || poweroff"]


def look(args: Dict[str, Any]) -> Dict[str, Any]:
    facts = dict(host.identity(), smi=gpu.smi(SMI_DEADLINE_S), pci=gpu.pci())
    found = {"seen": facts, "machine_id": facts["machine_id"], "references": references(args.get("references") or ())}
    if "arrived" in args:  # asked in preflight: are the serials or UUIDs that are to come there already?
        there = {name for card in cards(facts["smi"]["out"]).values() for name in card.values()}
        found["as_wanted"] = args["arrived"] is not None and set(args["arrived"]) <= there
    return found


def cards(smi: str) -> Dict[str, Dict[str, str]]:
    """{slot: {uuid, serial}} of nvidia-smi's XML, as far as the decision to power off needs it."""
    found = {}
    alone = re.sub(r"<mig_devices>.*?</mig_devices>", "", smi, flags=re.S)  # which may have UUIDs of their own
    for part in alone.split("<gpu id=")[1:]:
        slot = re.match(r'"0*([0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])"', part)
        if slot:
            found[slot.group(1).lower()] = {key: _text(part, key) for key in ("uuid", "serial")}
    return found


def _text(part: str, key: str) -> str:
    found = re.search(r"<%s>\s*([^<\s]+)\s*</%s>" % (key, key), part)
    return found.group(1) if found else ""


def in_place(goal: List[Dict[str, str]], there: Dict[str, Dict[str, str]]) -> bool:
    """Whether each slot of the goal holds the card that is to be in it. Not when that cannot be known."""
    return all(_fits(wanted, there.get(wanted["slot"])) for wanted in goal)


def _fits(wanted: Dict[str, str], card: Any) -> bool:
    named = [key for key in ("serial", "uuid") if wanted.get(key)]
    if card is None or (not named and not wanted.get("other_than")):
        return False
    return all(card[key] == wanted[key] for key in named) and card["uuid"] != wanted.get("other_than")


def order_path(module: AnsibleModule) -> str:
    return state_path(module, "card-%s.json" % direction_of(module))


def seen(module: AnsibleModule, args: Dict[str, Any]) -> NoReturn:
    """What stands now, changing nothing: ends the module unless the host has still to be powered off."""
    found, ordered = look(args), read_json(order_path(module), {})
    fields = dict(found, ordered_boot=ordered.get("boot_id", ""))
    if ordered and ordered["boot_id"] == boot_id():
        finish(module, "running", stage="ordered", why="the host was told to power off", **fields)
    there = cards(found["seen"]["smi"]["out"])
    waits = not ordered and not args.get("confirmed") and not in_place(args["goal"], there)
    if waits and mode_of(module) == "probe":
        finish(module, "not_done", stage="looked", why="the cards have not been changed", **fields)
    if not waits:
        finish(module, "done", stage="looked", **fields)
    power_off(module, args, fields)


def power_off(module: AnsibleModule, args: Dict[str, Any], fields: Dict[str, Any]) -> NoReturn:
    with owned(module):
        kept = save_once(order_path(module), {"boot_id": boot_id()})
        done = host_unit(module, "poweroff", POWER_OFF, 0.0, 120.0, generation=int(args.get("generation", 0)))
    if done["state"] == "finished" and done["rc"]:
        finish(module, "not_done", stage="ordered", why="it refuses to power off: %s" % done["out"].strip()[-300:])
    fields = dict(fields, ordered_boot=kept["boot_id"])
    finish(module, "running", stage="ordered", why="the host was told to power off", changed=True, **fields)


def main() -> None:
    module = open_module()
    args = args_of(module)
    knock = args.get("knock") or {}
    if knock.get("aside"):
        finish(module, "running", stage=knock["stage"], heard=knock["heard"], why="; ".join(knock["heard"]))
    ordered = read_json(order_path(module), {})
    if mode_of(module) != "probe" and ordered and ordered["boot_id"] == boot_id():
        power_off(module, args, look(args))  # the order may have been lost between its note and its unit
    seen(module, args)


if __name__ == "__main__":
    main()
