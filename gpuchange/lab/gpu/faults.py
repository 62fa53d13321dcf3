"""Faults of the simulated stack: how to stage and how to mend each, inside a running guest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Run = Callable[[list[str]], str]
"""Runs one command in the guest and returns its output; raises when the command fails."""

FOLDER = "/etc/gpuchange-lab/faults"
REFRESH = "/usr/lib/gpuchange-lab/simgpu refresh"
DRIVER = "sed -n 's/.*Kernel Module  *\\([^ ]*\\).*/\\1/p' /proc/driver/nvidia/version"
INSTALLED = "dpkg-query -W -f='${db:Status-Status} ${Package}\\n' | sed -n 's/^installed //p'"
STATUS = "/var/lib/dpkg/status"


@dataclass(frozen=True)
class Fault:
    """One fault. `stage` and `repair` are shell texts for the guest's /bin/sh, each safe to run twice."""

    name: str
    sentence: str
    stage: str
    repair: str

    def apply(self, run: Run) -> None:
        run(["/bin/sh", "-ec", f"mkdir -p {FOLDER}; {self.stage}"])

    def mend(self, run: Run) -> None:
        run(["/bin/sh", "-ec", self.repair])


def _flag(name: str, sentence: str, content: str) -> Fault:
    """A fault that the simulated kernel or dkms looks up; `content` is shell text that prints its value."""
    path = f"{FOLDER}/{name}"
    return Fault(name, sentence, f"{content} > {path}; {REFRESH}", f"rm -f {path}; {REFRESH}")


def _sources(from_folder: str, to_folder: str) -> str:
    """Points the guest's lab sources at another index folder of the same repository."""
    files = "grep -lE '^deb .*trusted=yes' /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null"
    return (
        f"for f in $({files}); do sed -i -E '/trusted=yes/s#{from_folder}/ *$#{to_folder}/#' \"$f\"; done;"
        " apt-get -qq update"
    )


def _driver_set(old: str, new: str, *options: str) -> str:
    """apt as the nightly upgrade calls it: every package of one driver to another, nobody reboots."""
    listed = "dpkg-query -W -f='${db:Status-Status} ${Package} ${Version}\\n'"
    chosen = f"set=$({listed} | sed -n 's/^installed \\(.*\\) {old}-0ubuntu1$/\\1={new}-0ubuntu1/p')"
    apt = f"exec -a /usr/bin/unattended-upgrade apt-get -y -q {' '.join(options)} install $set"
    return f"""{chosen}; [ -z "$set" ] || DEBIAN_FRONTEND=noninteractive set="$set" bash -c '{apt}'"""


_STALE = "/var/lib/dkms/nvidia/390.48"
_TOOLS = "/usr/lib/gpuchange-lab"
_HANG = f"{FOLDER}/apt-hangs"
_HALF = (
    "sed -i '/^Package: nvidia-container-toolkit-base$/,/^$/"
    "s/^Status: .*/Status: install ok half-configured/' " + STATUS
)
_DRIVER_PACKAGE = f"{INSTALLED} | grep '^nvidia-driver-'"

_TABLE = (
    _flag("driver-build-fails", "the next driver's module does not build; apt reports success", DRIVER),
    _flag(
        "card-lost-at-reboot",
        "the last card falls off the bus at the next boot",
        "cat /proc/sys/kernel/random/boot_id",
    ),
    _flag("wrong-values", "any other driver than the loaded one makes the cards compute wrong values", DRIVER),
    _flag(
        "ecc-errors",
        "any other driver than the loaded one brings uncorrectable memory errors, ever more of them",
        DRIVER,
    ),
    _flag("overheat", "any other driver than the loaded one lets every card run 65 degrees hotter", DRIVER),
    _flag("driver-hangs", "any other driver than the loaded one never answers nvidia-smi or CUDA", DRIVER),
    _flag("slow-card", "any other driver than the loaded one makes every card three times slower", DRIVER),
    _flag("slow-one-card", "any other driver than the loaded one makes the last card a third slower", DRIVER),
    _flag("link-half-width", "under any other driver the last card's PCIe link has half its width", DRIVER),
    _flag("xid-in-log", "any other driver reports Xid 62 for the last card as it is loaded", DRIVER),
    _flag(
        "card-needs-reset",
        "under any other driver the last card waits for a reset: it is listed and does nothing",
        DRIVER,
    ),
    _flag("throttle-under-load", "under any other driver the cards are slowed down by heat while they work", DRIVER),
    _flag("kernel-hangs", "under any other driver the last card never ends a process's 32nd arithmetic kernel", DRIVER),
    Fault(
        "apt-hangs",
        "the next package to be configured asks a question on a terminal and waits for ever",
        f"rm -f {_HANG}; mkfifo {_HANG}",
        # An answer to whoever waits, and nobody else may begin to; opening for both directions never blocks.
        f"if [ -p {_HANG} ]; then exec 3<> {_HANG}; rm -f {_HANG}; echo n >&3; sleep 1; fi",
    ),
    _flag("key-rejected", "Secure Boot: the kernel refuses any other driver than the loaded one", DRIVER),
    _flag("nvswitch", "the host has four NVSwitches", "echo 4"),
    Fault(
        "secure-boot",
        "Secure Boot is on, and the key with which DKMS signs is not enrolled",
        f"ln -sf {_TOOLS}/mokutil /usr/local/bin/; touch /var/lib/dkms/mok.pub; {DRIVER} > {FOLDER}/key-rejected",
        f"rm -f /usr/local/bin/mokutil /var/lib/dkms/mok.pub {FOLDER}/key-rejected",
    ),
    Fault(
        "stale-dkms-tree",
        "a driver that was removed long ago has left its tree behind in DKMS",
        f"mkdir -p {_STALE}; ln -sfn /usr/src/nvidia-390.48 {_STALE}/source",
        f"rm -rf {_STALE}",
    ),
    Fault(
        "upgraded-overnight",
        "an unattended upgrade has replaced the driver's packages; nobody has rebooted",
        _driver_set("550.54.15", "550.163.01"),
        _driver_set("550.163.01", "550.54.15", "--allow-downgrades"),
    ),
    Fault(
        "gpu-container",
        "a container with GPUs runs; reloading systemd takes them away from it",
        f"ln -sf {_TOOLS}/docker /usr/local/bin/docker; docker start",
        "docker stop; rm -f /usr/local/bin/docker",
    ),
    Fault(
        "repo-old-gone",
        "the repository lists only the newest version of each package",
        _sources(r"\.", "newest"),
        _sources("newest", "."),
    ),
    Fault(
        "held-package",
        "the driver's metapackage is on hold",
        f"{_DRIVER_PACKAGE} | xargs apt-mark hold",
        f"{_DRIVER_PACKAGE} | xargs apt-mark unhold",
    ),
    Fault(
        "dpkg-interrupted",
        "dpkg was interrupted and left a package half configured",
        _HALF,
        "dpkg --configure -a",
    ),
)

FAULTS: dict[str, Fault] = {fault.name: fault for fault in _TABLE}
"""Every fault by its name."""
