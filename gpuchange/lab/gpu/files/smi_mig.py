"""What nvidia-smi changes on simulated cards: MIG instances, modes, limits; and how it lists instances.

Modes stand in the cards' own file, as on a real card; what only the loaded driver knows is kept under /run, so that it
is gone after a boot: MIG instances, persistence, power limits.
"""

import hashlib
import json
import os
import subprocess
import uuid

from smi_fields import HELD, held, holders, read

OWN_FILE = "/etc/gpuchange-lab/cards.json"
PROFILES = {  # of an H100 80GB: name, id, memory slices, where it may start, first instance id, memory, multiprocessors
    "1g.10gb": (19, 1, range(7), 7, 9856, 16),
    "1g.20gb": (15, 2, (0, 2, 4, 6), 3, 20096, 26),
    "2g.20gb": (14, 2, (0, 2, 4), 3, 20096, 32),
    "3g.40gb": (9, 4, (0, 4), 1, 40448, 60),
    "4g.40gb": (5, 4, (0,), 1, 40448, 64),
    "7g.80gb": (0, 8, (0,), 0, 81559, 132),
}


class Refused(Exception):
    """What the tool says instead, with its exit code."""

    def __init__(self, code, text):
        super().__init__(text)
        self.code, self.text = code, text


def instances(card):
    return sorted(held().get(card["uuid"], {}).get("mig", []), key=lambda row: row["gi"])


def keep(card, **values):
    """Remember something of this card for as long as the driver is loaded."""
    everything = held()
    everything.setdefault(card["uuid"], {}).update(values)
    with open(HELD + ".new", "w") as file:
        json.dump(everything, file)
    os.replace(HELD + ".new", HELD)


def describe(card, **values):
    """Change the card itself."""
    found = json.loads(read(OWN_FILE))
    for own in found["cards"]:
        if own["uuid"] == card["uuid"]:
            own.update(values)
    with open(OWN_FILE + ".new", "w") as file:
        json.dump(found, file, indent=1)
    os.replace(OWN_FILE + ".new", OWN_FILE)
    subprocess.run(["/usr/lib/gpuchange-lab/simgpu", "refresh"], check=True)


# --- instances ---------------------------------------------------------------------------------------------


def wanted_profile(text):
    name, _, start = text.strip().partition(":")
    name = name[4:] if name.startswith("MIG ") else name
    found = next((key for key, row in PROFILES.items() if name in (key, str(row[0]))), None)
    if found is None:
        raise Refused(2, f"Invalid GPU instance profile: {text}\n")
    return found, int(start) if start else None


def place(card, name, start):
    """The new instance, or Refused when its slices are taken."""
    profile, size, starts, first, memory, processors = PROFILES[name]
    present = instances(card)
    taken = {slot for row in present for slot in range(row["start"], row["start"] + row["size"])}
    free = [at for at in starts if not taken & set(range(at, at + size)) and start in (None, at)]
    if not free:
        text = "Unable to create a GPU instance on GPU {:>2} using profile {}: Insufficient Resources\n"
        raise Refused(255, text.format(card["index"], profile))
    used = {row["gi"] for row in present}
    instance = next(number for number in range(first, 15) if number not in used)
    seed = hashlib.sha256("{}/{}/0".format(card["uuid"], instance).encode()).digest()
    return {
        "name": name, "profile": profile, "gi": instance, "start": free[0], "size": size, "memory": memory,
        "processors": processors, "uuid": f"MIG-{uuid.UUID(bytes=seed[:16], version=5)}",
    }  # fmt: skip


def create(card, profiles):
    said = ""
    for text in profiles.split(","):
        row = place(card, *wanted_profile(text))
        keep(card, mig=[*instances(card), row])
        line = "Successfully created GPU instance ID {:>2} on GPU {:>2} using profile MIG {} (ID {:>2})\n"
        said += line.format(row["gi"], card["index"], row["name"], row["profile"])
    return said


def destroy(card):
    lines = [
        "Successfully destroyed GPU instance ID {:>2} from GPU {:>2}\n".format(r["gi"], card["index"])
        for r in instances(card)
    ]
    keep(card, mig=[])
    return "".join(lines)


TABLE_HEAD = """+-------------------------------------------------------+
| GPU instances:                                        |
| GPU   Name             Profile  Instance   Placement  |
|                          ID       ID       Start:Size |
|=======================================================|
"""
TABLE_ROW = """|{:>4}  MIG {:<15}{:>4}{:>9}{:>12}     |
+-------------------------------------------------------+
"""


def listing(cards):
    rows = [(card["index"], row) for card in cards for row in instances(card)]
    if not rows:
        return "No GPU instances found: Not Found\n"
    return TABLE_HEAD + "".join(
        TABLE_ROW.format(index, row["name"], row["profile"], row["gi"], "{}:{}".format(row["start"], row["size"]))
        for index, row in rows
    )


def command(arguments, select, cards):
    """`nvidia-smi mig ...`: text to print. Raises Refused."""
    words = list(arguments)
    options = {}
    while words:
        word = words.pop(0)
        options[word] = words.pop(0) if word in ("-i", "-cgi") and words else ""
    chosen = [card for card in select(cards, options.get("-i")) if card["mig"] == "Enabled"]
    if not chosen:
        raise Refused(6, "No MIG-enabled devices found.\n")
    if "-cgi" in options:
        return "".join(create(card, options["-cgi"]) for card in chosen)
    if "-dgi" in options or "-dci" in options:
        return "".join(destroy(card) for card in chosen)
    if "-lgi" in options:
        return listing(chosen)
    raise Refused(1, 'Option "{}" is not recognized.\n'.format(" ".join(arguments)))


# --- modes and limits --------------------------------------------------------------------------------------


def persistence(card, value):
    word = "Enabled" if value == "1" else "Disabled"
    keep(card, persistence=word)
    return "{} persistence mode for GPU {}.\n".format(word, card["pci"])


def power_limit(card, value):
    watts = float(value)
    if not 200 <= watts <= card["power_limit_max_w"]:
        text = "Provided power limit {:.2f} W is not a valid power limit which should be between 200.00 W and"
        text += " {:.2f} W for GPU {}\n"
        raise Refused(2, text.format(watts, card["power_limit_max_w"], card["pci"]))
    keep(card, power_limit_w=watts)
    return "Power limit for GPU {} was set to {:.2f} W.\n".format(card["pci"], watts)


def mode(key, title):
    """ECC counts from the next boot; MIG at once unless somebody has the card open."""

    def change(card, value):
        word = "Enabled" if value == "1" else "Disabled"
        at_once = key == "mig" and not holders(card)
        if at_once:
            keep(card, mig=[])
        describe(card, **dict({key: word} if at_once else {}, **{key + "_pending": word}))
        warning = "Warning: {} is in pending {} state for GPU {}\n".format(title, word[:-1].lower(), card["pci"])
        return ("" if at_once else warning) + "{} {} for GPU {}\n".format(word, title, card["pci"])

    return change


SETTERS = {
    "-pm": persistence, "--persistence-mode": persistence, "-pl": power_limit, "--power-limit": power_limit,
    "-mig": mode("mig", "MIG Mode"), "--multi-instance-gpu": mode("mig", "MIG Mode"),
    "-e": mode("ecc", "ECC support"), "--ecc-config": mode("ecc", "ECC support"),
}  # fmt: skip


def set_all(cards, option, value):
    return "".join(SETTERS[option](card, value) for card in cards) + "All done.\n"
