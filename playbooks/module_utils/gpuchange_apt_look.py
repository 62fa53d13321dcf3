"""What a stack change by apt would do to this host, read without changing it: choice, simulation, findings."""

from __future__ import annotations

import glob
import os
from typing import Any, Dict, Iterable, List, Set, Tuple

from ansible.module_utils import gpuchange_dpkg_lock, gpuchange_secure_boot
from ansible.module_utils.gpuchange_apt_auto import Ranges, close_open
from ansible.module_utils.gpuchange_apt_choice import (
    DRIVER_FAMILY,
    Choice,
    Offer,
    choose,
    installed_driver,
    upstream,
)
from ansible.module_utils.gpuchange_apt_private import Move, PrivateApt, explained, strangers, targets_of
from ansible.module_utils.gpuchange_dkms import headers_problem
from ansible.module_utils.gpuchange_driver import driver_state
from ansible.module_utils.gpuchange_host import is_executable, run
from ansible.module_utils.gpuchange_packages import alternatives, audit, installed, is_stack, marks
from ansible.module_utils.gpuchange_runfile_look import run_problem

MIB = 1024 * 1024
STORE = "/var/lib/gpuchange"
ARCHIVES = "/var/cache/apt/archives"
LOCK_PATIENCE_S = 15.0
BUILD_ROOM = 512 * MIB
TIMERS = ("apt-daily.timer", "apt-daily-upgrade.timer")
AUTOMATIC = (*TIMERS, "unattended-upgrades.service")


class Facts:
    """One look at the host's package state."""

    def __init__(self) -> None:
        self.rows = installed()
        self.versions = {key: row["version"] for key, row in self.rows.items()}
        self.stack = {key: version for key, version in self.versions.items() if is_stack(self.rows[key]["name"])}
        self.holds = marks("showhold")
        self.audit = audit()
        self.driver = driver_state()


def examine(apt: PrivateApt, wanted: Dict[str, str], cuda_select: bool, fits: Dict[str, Ranges]) -> Dict[str, Any]:
    """The preflight report's body: choice, transaction, what is in the way (problems) and worth knowing (findings).

    `fits` has the versions that are known to fit, for each component that is wanted as "auto".
    """
    facts = Facts()
    offer = apt.offer(_names_to_ask(apt.names(), facts.stack))
    opened = close_open(wanted, fits, offer, facts.stack)
    choice = choose(opened.wanted, offer, facts.stack)
    choice.problems += opened.problems
    moves, why = apt.simulate(targets_of(choice.install, choice.remove)) if not choice.problems else ([], "")
    why = explained(why, apt.policy) if why else ""
    unknown = {move["name"] for move in moves} - set(offer.by_name)
    extra = {(record["name"], record["version"]): record for record in apt.records(unknown)}
    records = {**extra, **{(name, v): row for name, rows in offer.by_name.items() for v, row in rows.items()}}
    sizes = _sizes(moves, records)
    turn = cuda_turn(choice.mains, alternatives(), cuda_select)
    problems = choice.problems + _problems(facts, choice, moves, why) + _space_problems(sizes, moves)
    return {
        "as_wanted": not problems and not moves and _driver_as_wanted(facts, choice) and not turn,
        "before": _component_versions(choice, facts.stack, facts.driver["loaded"]),
        "after": {part: upstream(choice.install[name]) for part, name in choice.mains.items()},
        "chosen": opened.chosen,
        "offered": opened.offered,
        "moves": moves,
        "transaction": _transaction(choice, moves),
        "reboot_needed": _reboot_needed(facts, choice, moves),
        "driver": facts.driver,
        "sizes": sizes,
        "not_obtainable": _not_obtainable(moves, records),
        "problems": problems,
        "findings": _findings(facts, choice, offer, moves),
    }


def _names_to_ask(offered: Iterable[str], stack: Dict[str, str]) -> Set[str]:
    """Every name of the stack, and again for each foreign architecture of which the host has driver packages."""
    names = set(offered) | set(stack)
    foreign = {name.partition(":")[2] for name in stack if ":" in name}
    plain = {name for name in names if ":" not in name and DRIVER_FAMILY.fullmatch(name)}
    return names | {"%s:%s" % (name, arch) for name in plain for arch in foreign}


def _transaction(choice: Choice, moves: List[Move]) -> Dict[str, Any]:
    """What moves, by exact name and version, dependencies that come along included; what is as wanted is left alone."""
    return {
        "install": {move["name"]: move["to"] for move in moves if move["to"]},
        "remove": sorted(move["name"] for move in moves if not move["to"]),
        "renamed": choice.renamed,
        "mains": choice.mains,
        "driver": upstream(choice.install[choice.mains["driver"]]) if "driver" in choice.mains else "",
    }


def _driver_as_wanted(facts: Facts, choice: Choice) -> bool:
    main = choice.mains.get("driver")
    return main is None or facts.driver["loaded"] == upstream(choice.install[main])


def _reboot_needed(facts: Facts, choice: Choice, moves: List[Move]) -> bool:
    return not _driver_as_wanted(facts, choice) and bool(moves or facts.driver["loaded"])


def _component_versions(choice: Choice, stack: Dict[str, str], loaded: str) -> Dict[str, str]:
    """What each wanted component is now; "" when absent. The driver: as loaded, else as installed."""
    found = {part: upstream(stack.get(name, "")) for part, name in choice.mains.items()}
    if "driver" in found:
        found["driver"] = loaded or installed_driver(stack)
    if "cuda" in found and not found["cuda"]:
        found["cuda"] = upstream(stack.get(toolkit_package(alternatives().get("cuda", {}).get("value", "")), ""))
    return found


def _problems(facts: Facts, choice: Choice, moves: List[Move], why: str) -> List[str]:
    problems = []
    if facts.audit:
        problems.append("dpkg is half-done (%s); mend it with dpkg --configure -a first" % _one_line(facts.audit))
    if why:
        problems.append("apt cannot make this change: %s" % why)
    problems += ["beyond the plan, %s" % stranger for stranger in strangers(moves, choice)]
    problems += [
        "the hold on %s stands in the way; the plan does not name it" % name
        for name in _foreign_holds(facts, choice, moves)
    ]
    ran = run_problem() if "driver" in choice.mains else ""
    problems += [ran] if ran else []
    if any("dkms" in name for name in choice.install) and moves:
        building = (headers_problem(facts.driver["boot_kernel"]), gpuchange_secure_boot.problem())
        problems += [problem for problem in building if problem]
    return problems + _lock_problem()


def _lock_problem() -> List[str]:
    """A package operation that is at work now may be over in a moment; one that waits for an answer never is."""
    holder = gpuchange_dpkg_lock.await_lock(LOCK_PATIENCE_S)
    return (
        ["dpkg is in use by %s: let it finish, or end just that one" % gpuchange_dpkg_lock.said(holder)]
        if holder
        else []
    )


def _foreign_holds(facts: Facts, choice: Choice, moves: List[Move]) -> List[str]:
    ours = set(choice.install) | set(choice.remove)
    return sorted({move["name"] for move in moves if move["name"] in facts.holds} - ours)


def _sizes(moves: List[Move], records: Dict[Tuple[str, str], Dict[str, Any]]) -> Dict[str, int]:
    def total(field: str, side: str) -> int:
        return sum(int(records.get((move["name"], move[side]), {}).get(field, 0)) for move in moves)

    return {
        "download": total("size", "to"),
        "keep": total("size", "from"),
        "installed": total("installed_size", "to"),
        "free_store": free_bytes(STORE),
        "free_usr": free_bytes("/usr"),
    }


def free_bytes(path: str) -> int:
    while not os.path.exists(path):
        path = os.path.dirname(path)
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def _space_problems(sizes: Dict[str, int], moves: List[Move]) -> List[str]:
    """Both sets of packages are kept; the old files go only while the new come, so both may be there at once."""
    if not moves:
        return []
    build = BUILD_ROOM if any("dkms" in move["name"] and move["to"] for move in moves) else 64 * MIB
    needs = (
        (STORE, sizes["download"] + sizes["keep"] + 64 * MIB, sizes["free_store"]),
        ("/usr", sizes["installed"] + build, sizes["free_usr"]),
    )
    return [
        "%s has %d MiB free, the change needs %d MiB" % (path, free // MIB, need // MIB)
        for path, need, free in needs
        if free < need
    ]


def _not_obtainable(moves: List[Move], records: Dict[Tuple[str, str], Dict[str, Any]]) -> List[str]:
    """Installed packages that a rollback would need and that no list, no cache and no tool can bring back."""
    if is_executable("dpkg-repack"):
        return []
    return [
        "%s %s" % (move["name"], move["from"])
        for move in moves
        if move["from"]
        and not records.get((move["name"], move["from"]), {}).get("offered")
        and not cached_debs(move["name"], move["from"])
    ]


def cached_debs(name: str, version: str) -> List[str]:
    """apt's own copies of a package (a colon in the version is written %3a)."""
    return sorted(glob.glob("%s/%s_%s_*.deb" % (ARCHIVES, name.partition(":")[0], version.replace(":", "%3a"))))


def _findings(facts: Facts, choice: Choice, offer: Offer, moves: List[Move]) -> List[str]:
    found = list(choice.notes)
    link = alternatives().get("cuda", {})
    if "cuda" in choice.mains and link.get("mode") == "manual":
        found.append("active toolkit is %s, chosen by hand: it stays unless cuda_select is true" % link["value"])
    installed_number, loaded = installed_driver(facts.stack), facts.driver["loaded"]
    if loaded and installed_number and loaded != installed_number:
        found.append("baseline inconsistent: module %s loaded, userspace %s" % (loaded, installed_number))
    for name, version in sorted(choice.install.items()):
        candidate = offer.candidates.get(name)
        if candidate and candidate != version and any(move["name"] == name for move in moves):
            found.append("%s: the plan's %s is taken, apt itself would take %s" % (name, version, candidate))
    named = set(choice.install) | set(choice.remove)
    found += ["%s is held: the hold is kept, at the plan's version" % name for name in facts.holds if name in named]
    new = [move["name"] for move in moves if not move["from"] and move["name"] not in choice.install]
    if new:
        found.append("new dependencies come along: %s" % ", ".join(new))
    running = [unit for unit in AUTOMATIC if _is_active(unit)]
    if running:
        found.append("automatic upgrades are on (%s): blocked while the host is out of service" % ", ".join(running))
    return found


def toolkit_package(path: str) -> str:
    """/usr/local/cuda-12.4 → cuda-toolkit-12-4."""
    return "cuda-toolkit-" + path.rpartition("/cuda-")[2].replace(".", "-")


def toolkit_path(package: str) -> str:
    """cuda-toolkit-12-8 → /usr/local/cuda-12.8; "" when the plan names no toolkit."""
    return "/usr/local/cuda-" + package[len("cuda-toolkit-") :].replace("-", ".") if package else ""


def cuda_turn(mains: Dict[str, str], links: Dict[str, Dict[str, str]], select: bool) -> str:
    """Where /usr/local/cuda must be turned to, or "": a link chosen by hand stays unless the plan says otherwise."""
    path, entry = toolkit_path(mains.get("cuda", "")), links.get("cuda", {"mode": "auto", "value": ""})
    by_hand = entry["mode"] == "manual" and not select
    return "" if not path or by_hand or entry["value"] == path else path


def _is_active(unit: str) -> bool:
    return run(["systemctl", "is-active", "--quiet", unit])[0] == 0


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
