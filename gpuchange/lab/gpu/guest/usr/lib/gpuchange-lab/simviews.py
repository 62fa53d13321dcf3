"""What tools read about a kernel's GPUs, made out of card descriptions: PCI tree, /sys/module, /proc/driver, /dev."""

import os
import shutil
import subprocess

RUN = "/run/gpuchange-lab"
PROC = "/proc/driver/nvidia"
PCI_VIEW = "/sys/bus/pci/devices"
MODULE_VIEW = "/sys/module"


def read(path, default=""):
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return default


def write(path, text):
    """Whole or not at all, for readers that look while we write."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path + ".new", "w") as file:
        file.write(text)
    os.replace(path + ".new", path)


def boot_id():
    return read("/proc/sys/kernel/random/boot_id").strip()


def kernel_log(line):
    """Into the ring buffer that dmesg shows, and into the journal."""
    with open(RUN + "/kernel.log", "a") as file:
        file.write("[{:>12.6f}] {}\n".format(float(read("/proc/uptime").split()[0]), line))
    subprocess.run(["logger", "-t", "kernel", "-p", "kern.notice", line], check=False, stderr=subprocess.DEVNULL)


def bus_id(card):
    """0000:1b:00.0, as the kernel writes it."""
    return card["pci"][4:].lower()


def mounted(path):
    return any(line.split()[1] == path for line in read("/proc/self/mounts").splitlines())


def mount(*arguments):
    subprocess.run(["mount", *arguments], check=True)


def config_space(card):
    """The first 64 bytes of a card's PCI configuration; a card that fell off the bus answers all ones."""
    if card["lost"]:
        return b"\xff" * 64
    config = bytearray(64)
    config[0:2], config[2:4] = (0x10DE).to_bytes(2, "little"), int(card["pci_device"], 16).to_bytes(2, "little")
    config[4:8], config[8:12] = bytes([0x06, 0x04, 0x10, 0x00]), bytes([0xA1, 0x00, 0x02, 0x03])
    config[44:46] = (0x10DE).to_bytes(2, "little")
    config[46:48] = int(card["pci_subsystem"], 16).to_bytes(2, "little")
    return bytes(config)


SPEEDS = {gen: f"{speed} GT/s PCIe\n" for gen, speed in ((1, "2.5"), (2, "5.0"), (3, "8.0"), (4, "16.0"), (5, "32.0"))}


def pci_files(card):
    return {
        "vendor": "0x10de\n",
        "device": "0x{}\n".format(card["pci_device"]),
        "subsystem_vendor": "0x10de\n",
        "subsystem_device": "0x{}\n".format(card["pci_subsystem"]),
        "class": "0x030200\n",
        "revision": "0xff\n" if card["lost"] else "0xa1\n",
        "irq": "{}\n".format(120 + card["minor"]),
        "resource": "",
        "current_link_speed": SPEEDS[card["link_gen"]],
        "max_link_speed": SPEEDS[card.get("link_gen_max", card["link_gen"])],
        "current_link_width": "{}\n".format(card["link_width"]),
        "max_link_width": "{}\n".format(card.get("link_width_max", card["link_width"])),
        "numa_node": "0\n",
    }


def pci_view(cards, switches=0):
    """The NVIDIA devices on the bus: cards, and so many NVSwitches."""
    bridges = [f"0000:05:{number:02x}.0" for number in range(switches)]
    present = {bus_id(card) for card in cards} | set(bridges)
    for gone in set(os.listdir(RUN + "/pci") if os.path.isdir(RUN + "/pci") else ()) - present:
        shutil.rmtree(RUN + "/pci/" + gone)
    for bridge in bridges:
        for name, text in (("vendor", "0x10de\n"), ("device", "0x22a3\n"), ("class", "0x068000\n")):
            write(f"{RUN}/pci/{bridge}/{name}", text)
    for card in cards:
        folder = f"{RUN}/pci/{bus_id(card)}"
        for name, text in pci_files(card).items():
            write(folder + "/" + name, text)
        with open(folder + "/config", "wb") as file:
            file.write(config_space(card))
    if os.path.isdir(PCI_VIEW) and not mounted(PCI_VIEW):
        mount("--bind", RUN + "/pci", PCI_VIEW)


def module_view():
    """A writable /sys/module in which the kernel's own entries are links."""
    if mounted(MODULE_VIEW):
        return
    if not os.path.isdir(MODULE_VIEW):  # a kernel built without modules; nspawn's /sys is a read-only tmpfs
        mount("-o", "remount,rw", "/sys")
        os.mkdir(MODULE_VIEW)
        mount("-o", "remount,ro", "/sys")
    own = RUN + "/sys-module"
    os.makedirs(own, exist_ok=True)
    mount("--bind", MODULE_VIEW, own)
    mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", MODULE_VIEW)
    for name in os.listdir(own):
        os.symlink(own + "/" + name, MODULE_VIEW + "/" + name)


def node(name, present):
    """A device node /dev/NAME: mknod is forbidden in a guest, a bound /dev/null is not."""
    path = "/dev/" + name
    if present and not os.path.exists(path):
        open(path, "w").close()
        mount("--bind", "/dev/null", path)
    elif not present and os.path.exists(path):
        subprocess.run(["umount", path], check=False, stderr=subprocess.DEVNULL)
        os.unlink(path)


VERSION_TEXT = """NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  {built}
GCC version:  gcc version 12.2.0 (Debian 12.2.0-14+deb12u1)
"""
INFORMATION = """Model: \t\t {name}
IRQ:   \t\t {irq}
GPU UUID: \t {uuid}
Video BIOS: \t {vbios}
Bus Type: \t PCIe
DMA Size: \t 52 bits
DMA Mask: \t 0xfffffffffffff
Bus Location: \t {bus}
Device Minor: \t {minor}
GPU Excluded:\t No
"""


def proc_view(version, cards):
    built = "Tue Jan  1 00:00:00 UTC 2025"
    write(PROC + "/version", VERSION_TEXT.format(version=version, built=built))
    write(PROC + "/params", "RegisterForACPIEvents: 1\nEnableMSI: 1\n")
    for card in (c for c in cards if not c["lost"]):
        text = INFORMATION.format(bus=bus_id(card), irq=120 + card["minor"], **card)
        write(f"{PROC}/gpus/{bus_id(card)}/information", text)
