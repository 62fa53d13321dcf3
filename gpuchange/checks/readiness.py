"""Whether a host is ready to be changed: every objection has a kind, by which a plan can accept it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gpuchange.checks import card_settings, compatibility, containers, fabric, package_set
from gpuchange.checks import driver as driver_of
from gpuchange.checks.snapshot import Snapshot, mapping
from gpuchange.compat.floors import cudnn_mismatch, too_old
from gpuchange.compat.resolver import answer

Kind = Literal[
    "facts_missing", "not_root", "program", "low_space", "path", "mount", "no_gpu", "gpu_not_answering",
    "inconsistent_baseline", "broken_packages", "mixed_packages", "broken_dkms", "incompatible", "fabric_manager",
    "clock", "no_systemd", "gpu_users", "note",
]  # fmt: skip
NOTES: frozenset[str] = frozenset({"no_systemd", "gpu_users", "note"})
"""Kinds that are said but never stop a change."""

NEEDED = ("packages", "loaded", "on_disk", "smi", "space", "paths", "services", "cuda", "cudnn", "gpu_users")
DAEMONS = ("nvidia-persiste", "nv-fabricmanage", "nv-hostengine", "nvidia-imex", "dcgm-exporter", "nvidia-powerd")
EARLIEST_CLOCK = 1735689600.0  # 2025-01-01: a clock before it makes signatures and certificates fail
GIB = 1024.0**3


@dataclass(frozen=True)
class Objection:
    kind: Kind
    says: str


@dataclass(frozen=True)
class Wish:
    """What the plan says that matters here."""

    paths: tuple[str, ...] = ()
    mounts: tuple[str, ...] = ()
    min_free: int = 0
    services: tuple[str, ...] = ()
    driver: str | None = None
    cuda: str | None = None
    cudnn: str | None = None
    dkms_set_aside: bool = False

    @property
    def versions(self) -> dict[str, str]:
        """The versions that the plan names."""
        named = {"driver": self.driver, "cuda": self.cuda, "cudnn": self.cudnn}
        return {part: version for part, version in named.items() if version}


def objections(
    facts: Mapping[str, Any], errors: Mapping[str, str], picture: Snapshot, wish: Wish
) -> tuple[Objection, ...]:
    """All objections, worst first as listed in CHECKS."""
    missing = [
        Objection("facts_missing", f"{name} could not be looked at: {errors[name]}")
        for name in NEEDED
        if name in errors
    ]
    return tuple(missing) + tuple(found for check in CHECKS for found in check(facts, picture, wish))


def _rights(facts: Mapping[str, Any], _picture: Snapshot, _wish: Wish) -> Iterator[Objection]:
    if facts.get("uid") != 0:
        yield Objection("not_root", f"runs as uid {facts.get('uid')}, not as root: use become (-b)")


def _space(facts: Mapping[str, Any], _picture: Snapshot, wish: Wish) -> Iterator[Objection]:
    seen = set()
    for path, raw in mapping(facts.get("space")).items():
        row = mapping(raw)
        on, free = str(row.get("on")), row.get("free")
        if not isinstance(free, int) or (free, on if row.get("read_only") else "") in seen:
            continue
        seen.add((free, on if row.get("read_only") else ""))
        if row.get("read_only"):
            yield Objection("low_space", f"{path} is on a read-only filesystem")
        elif free < wish.min_free:
            yield Objection(
                "low_space", f"{path} has {free / GIB:.1f} GiB free, {wish.min_free / GIB:.1f} GiB are wanted"
            )
        if isinstance(row.get("inodes_free"), int) and row["inodes_free"] < 1000:
            yield Objection("low_space", f"{path} has {row['inodes_free']} inodes free")


def _paths(facts: Mapping[str, Any], _picture: Snapshot, wish: Wish) -> Iterator[Objection]:
    seen = {path: mapping(row) for path, row in mapping(facts.get("paths")).items()}
    for path in wish.paths:
        if not seen.get(path, {}).get("kind"):
            yield Objection("path", f"{path} does not exist")
    for path in wish.mounts:
        row = seen.get(path, {})
        if not row.get("is_mount"):
            over = mapping(row.get("filesystem")).get("mount", "?")
            yield Objection("mount", f"{path} is not mounted (what is there belongs to {over})")


def _programs(facts: Mapping[str, Any], _picture: Snapshot, _wish: Wish) -> Iterator[Objection]:
    for name, path in mapping(facts.get("binaries")).items():
        if not path:
            yield Objection("program", f"{name} is not installed on this host: the plan needs it")


def _cards(facts: Mapping[str, Any], picture: Snapshot, _wish: Wish) -> Iterator[Objection]:
    smi, count = picture.smi, len(picture.pci)
    if not count and not smi.cards:
        yield Objection("no_gpu", "no NVIDIA GPU on the PCI bus")
    elif smi.dead:
        yield Objection("gpu_not_answering", f"{smi.why}: look at the card itself (reseat, replace)")
    elif smi.ok and count > len(smi.cards):
        silent = sorted(set(picture.pci) - {card.bus_id for card in smi.cards})
        yield Objection(
            "gpu_not_answering", f"{len(smi.cards)} of {count} GPUs answer; on the bus only: {', '.join(silent)}"
        )
    elif not smi.ok and picture.driver.userspace:
        yield Objection("gpu_not_answering", smi.why)
    for line in card_settings.pending(smi.cards):
        yield Objection("note", line)


def _baseline(facts: Mapping[str, Any], picture: Snapshot, _wish: Wish) -> Iterator[Objection]:
    for found in driver_of.inconsistencies(picture.driver, str(facts.get("apt_history") or "")):
        yield Objection("inconsistent_baseline", f"baseline inconsistent: {found}")
    packages = mapping(facts.get("packages"))
    broken = mapping(packages.get("broken"))
    if broken:
        named = ", ".join(f"{name} ({status})" for name, status in sorted(broken.items())[:5])
        twice = "duplicate" in broken.values()
        remedy = "dnf remove --duplicates" if twice else "dpkg --configure -a"
        yield Objection("broken_packages", f"packages not fully installed: {named}; run {remedy}")
    unmet = packages.get("unmet")
    if isinstance(unmet, list) and unmet:
        yield Objection("broken_packages", f"unmet dependencies: {'; '.join(str(line) for line in unmet[:5])}")
    table = package_set.mixed(picture.packages, mapping(packages.get("origins")))
    if table:
        yield Objection("mixed_packages", f"the driver's packages are of several builds: {table}; mend that first")


def _dkms(facts: Mapping[str, Any], _picture: Snapshot, wish: Wish) -> Iterator[Objection]:
    said = mapping(facts.get("dkms"))
    trouble = driver_of.dkms_trouble(said)
    if trouble and said.get("leftovers") and wish.dkms_set_aside:
        yield Objection("note", f"{trouble}: it is set aside before the packages change, and a rollback puts it back")
    elif trouble and said.get("leftovers"):
        yield Objection("broken_dkms", f"{trouble}; to have it set aside, write stack: {{dkms_leftovers: set_aside}}")
    elif trouble:
        yield Objection("broken_dkms", trouble)


def _containers(facts: Mapping[str, Any], picture: Snapshot, _wish: Wish) -> Iterator[Objection]:
    for name, says in containers.blind(facts).items() if picture.smi.ok else ():
        yield Objection("note", f"host OK, container {name.partition(' ')[2]} sees no GPU: {says}")


def _compatible(facts: Mapping[str, Any], picture: Snapshot, wish: Wish) -> Iterator[Objection]:
    wished = wish.versions
    asked = compatibility.question(facts, picture, wished)
    found = answer(asked)
    for row in compatibility.against(found, wished):
        yield Objection("incompatible", row.sentence())
    for line in compatibility.worth_knowing(found, wished) if wished else ():
        yield Objection("note", line)
    outgrown = (
        too_old(asked.driver, asked.cuda) if not ({"driver", "cuda"} & wished.keys() or asked.cuda_compat) else ""
    )
    if outgrown:
        yield Objection("note", outgrown)
    for name in sorted(picture.packages):
        built = re.fullmatch(r"libcudnn\d+-cuda-(\d+)", name)
        clash = cudnn_mismatch(built[1], asked.cuda) if built else ""
        if clash:
            yield Objection("note", f"{name}: {clash}")


def _fabric(facts: Mapping[str, Any], picture: Snapshot, _wish: Wish) -> Iterator[Objection]:
    manager, driver = picture.fabric_manager, picture.driver.userspace or picture.driver.loaded
    if picture.switches and not manager:
        yield Objection("fabric_manager", "NVSwitch present, but no fabric manager is installed")
    elif picture.switches and driver and manager != driver:
        yield Objection(
            "fabric_manager",
            f"fabric manager {manager} does not start with driver {driver}: the versions must be equal",
        )
    for line in fabric.troubles(facts, picture):
        yield Objection("fabric_manager", line)
    if fabric.superfluous(facts, picture):
        yield Objection("note", fabric.superfluous(facts, picture))


def _system(facts: Mapping[str, Any], _picture: Snapshot, _wish: Wish) -> Iterator[Objection]:
    if not facts.get("systemd"):
        yield Objection("no_systemd", "systemd does not run here: long work runs as detached processes")
    epoch = mapping(facts.get("clock")).get("epoch")
    if isinstance(epoch, int | float) and epoch < EARLIEST_CLOCK:
        yield Objection("clock", f"the clock stands before 2025 ({epoch:.0f} s): package signatures would be refused")


def _users(_facts: Mapping[str, Any], picture: Snapshot, wish: Wish) -> Iterator[Objection]:
    for user in picture.gpu_users:
        if not is_daemon(user.comm) and user.unit not in wish.services:
            home = f" of {user.unit}" if user.unit else ""
            yield Objection("gpu_users", f"GPU in use by {user.comm}{home} (pid {user.pid}): {', '.join(user.devices)}")


def is_daemon(comm: str) -> bool:
    """Whether this is a part of the driver: it stops and starts with it."""
    return comm.startswith(DAEMONS)


CHECKS: tuple[Callable[[Mapping[str, Any], Snapshot, Wish], Iterator[Objection]], ...] = (
    _rights, _space, _paths, _programs, _cards, _baseline, _dkms, _compatible, _fabric, _system, _users, _containers,
)  # fmt: skip
