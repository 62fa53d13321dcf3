"""What nvidia-smi can say about a simulated card: its processes, and each field's text."""

import glob
import json
import os
import time

VERSION = "@UPSTREAM@"
CARDS = "/run/gpuchange-lab/cards.json"
HELD = "/run/gpuchange-lab/held.json"
LIVE = ("persistence", "power_limit_w")
"""What of a card stands in HELD, as long as the driver is loaded."""


def read(path):
    with open(path) as file:
        return file.read()


def short_bus(card):
    return card["pci"][4:]


def held():
    """{uuid: what the loaded driver was told of this card}"""
    return json.loads(read(HELD)) if os.path.exists(HELD) else {}


def all_cards():
    """The cards that the driver could initialise; what it could not is on the PCI bus only."""
    live = held()
    known = [card for card in json.loads(read(CARDS))["cards"] if not card.get("uninitialised")]
    return [_card(index, card, live) for index, card in enumerate(known)]


def _card(index, card, live):
    told = {key: value for key, value in live.get(card["uuid"], {}).items() if key in LIVE}
    pending = {key + "_pending": card.get(key + "_pending") or card[key] for key in ("mig", "ecc")}
    return dict(dict(card, index=index, power_limit_max_w=card["power_limit_w"], **pending), **told)


SICK = "GPU requires reset"


def sick(card, text, brackets=True):
    """What cannot be read of a card that waits for a reset, though it is listed and the exit code is 0."""
    return text if not card.get("needs_reset") else f"[{SICK}]" if brackets else SICK


def holders(card):
    """Pids that hold the card's device node open."""
    target = "/dev/nvidia{}".format(card["minor"])
    pids = set()
    for link in glob.iglob("/proc/[0-9]*/fd/*"):
        try:
            if os.readlink(link) == target:
                pids.add(int(link.split("/")[2]))
        except OSError:
            continue
    return sorted(pids)


def process_name(pid):
    try:
        return read(f"/proc/{pid}/cmdline").split("\0")[0] or "[Not Found]"
    except OSError:
        return "[Not Found]"


def processes(card):
    return [{"pid": pid, "process_name": process_name(pid), "used_gpu_memory": None} for pid in holders(card)]


def used_mib(card):
    return 1 + 518 * len(holders(card))


def constant(text):
    return lambda card: text


def key(name, unit=""):
    return lambda card: "{}{}".format(card[name], " " + unit if unit else "")


def watts(name):
    return lambda card: f"{card[name]:.2f} W"


def ecc_errors(card, kind, where):
    """A failing memory goes on failing: one uncorrectable DRAM error a second since the driver was loaded."""
    failing = card["ecc_since"] and kind == "uncorrected" and where != "sram"
    return str(int(time.time() - card["ecc_since"]) if failing else 0)


def ecc_field(kind, where):
    return lambda card: ecc_errors(card, kind, where)


ECC = {
    f"ecc.errors.{kind}.{span}.{where}": ecc_field(kind, where)
    for kind in ("corrected", "uncorrected")
    for span in ("volatile", "aggregate")
    for where in ("total", "device_memory", "dram", "sram")
}
SLOWDOWNS = ("hw_slowdown", "hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown", "sw_power_cap")
THROTTLE = {
    f"{prefix}.{reason}": constant("Not Active")
    for prefix in ("clocks_throttle_reasons", "clocks_event_reasons")
    for reason in SLOWDOWNS
}


def slowed(card):
    """A card whose cooling fails under load only."""
    return bool(card.get("throttled") and holders(card))


def sm_clock(card):
    return "{} MHz".format(210 if slowed(card) else card["clock_sm_mhz"])


def reasons(card):
    return f"0x{0x40 if slowed(card) else 0x1:016x}"


FIELDS = {
    "timestamp": lambda c: time.strftime("%Y/%m/%d %H:%M:%S.000"),
    "driver_version": constant(VERSION),
    "count": lambda c: str(len(all_cards())),
    "index": key("index"),
    "name": key("name"),
    "uuid": key("uuid"),
    "serial": key("serial"),
    "vbios_version": key("vbios"),
    "pci.bus_id": key("pci"),
    "pci.domain": constant("0x0000"),
    "pci.bus": lambda c: "0x" + c["pci"][9:11],
    "pci.device": lambda c: "0x" + c["pci"][12:14],
    "pci.device_id": lambda c: "0x{}10DE".format(c["pci_device"].upper()),
    "pci.sub_device_id": lambda c: "0x{}10DE".format(c["pci_subsystem"].upper()),
    "pcie.link.gen.current": key("link_gen"),
    "pcie.link.gen.max": lambda c: str(c.get("link_gen_max", c["link_gen"])),
    "pcie.link.gen.gpucurrent": key("link_gen"),
    "pcie.link.gen.gpumax": lambda c: str(c.get("link_gen_max", c["link_gen"])),
    "pcie.link.width.current": key("link_width"),
    "pcie.link.width.max": lambda c: str(c.get("link_width_max", c["link_width"])),
    "compute_cap": key("compute_capability"),
    "persistence_mode": key("persistence"),
    "accounting.mode": constant("Disabled"),
    "display_mode": constant("Disabled"),
    "display_active": constant("Disabled"),
    "compute_mode": constant("Default"),
    "pstate": lambda c: sick(c, "P0"),
    "fan.speed": constant("[N/A]"),
    "memory.total": key("memory_mib", "MiB"),
    "memory.reserved": constant("551 MiB"),
    "memory.used": lambda c: f"{used_mib(c)} MiB",
    "memory.free": lambda c: "{} MiB".format(c["memory_mib"] - used_mib(c) - 551),
    "utilization.gpu": lambda c: sick(c, "[N/A]" if c["mig"] == "Enabled" else "0 %"),
    "utilization.memory": constant("0 %"),
    "ecc.mode.current": key("ecc"),
    "ecc.mode.pending": key("ecc_pending"),
    "mig.mode.current": key("mig"),
    "mig.mode.pending": key("mig_pending"),
    "retired_pages.single_bit_ecc.count": constant("[N/A]"),
    "retired_pages.double_bit.count": constant("[N/A]"),
    "retired_pages.pending": constant("[N/A]"),
    "temperature.gpu": lambda c: sick(c, str(c["temperature_c"])),
    "temperature.memory": lambda c: str(c["temperature_c"] + 11),
    "power.management": constant("Enabled"),
    "power.draw": lambda c: sick(c, "{:.2f} W".format(c["power_draw_w"])),
    "power.limit": watts("power_limit_w"),
    "enforced.power.limit": watts("power_limit_w"),
    "power.default_limit": watts("power_limit_max_w"),
    "power.min_limit": constant("200.00 W"),
    "power.max_limit": watts("power_limit_max_w"),
    "clocks.current.graphics": key("clock_sm_mhz", "MHz"),
    "clocks.current.sm": lambda c: sick(c, sm_clock(c)),
    "clocks.current.memory": key("clock_mem_mhz", "MHz"),
    "clocks.max.graphics": key("clock_sm_max_mhz", "MHz"),
    "clocks.max.sm": key("clock_sm_max_mhz", "MHz"),
    "clocks.max.memory": key("clock_mem_max_mhz", "MHz"),
    "clocks.applications.graphics": key("clock_sm_max_mhz", "MHz"),
    "clocks.applications.memory": key("clock_mem_max_mhz", "MHz"),
    "clocks_throttle_reasons.active": reasons,
    "clocks_event_reasons.active": reasons,
    "gpu_serial": key("serial"),
    "gpu_bus_id": key("pci"),
    "gpu_uuid": key("uuid"),
    "gpu_name": key("name"),
}
FIELDS.update(ECC)
FIELDS.update(THROTTLE)
ALIASES = {
    f"clocks.{short}": f"clocks.current.{name}" for short, name in (("gr", "graphics"), ("sm", "sm"), ("mem", "memory"))
}
HEADINGS = {" MiB": " [MiB]", " MHz": " [MHz]", " W": " [W]", " %": " [%]"}
APP_FIELDS = ("timestamp", "gpu_name", "gpu_bus_id", "gpu_serial", "gpu_uuid", "pid", "process_name", "used_gpu_memory")
APP_ALIASES = {"name": "process_name", "used_memory": "used_gpu_memory"}


def unit_of(text):
    return next((unit for unit in HEADINGS if text.endswith(unit)), "")
