"""What a stack change by dnf would do to this host, read without changing it: choice, simulation, findings."""

from __future__ import annotations

import glob
import os
from typing import Any, Dict, List, Set

from ansible.module_utils import gpuchange_secure_boot
from ansible.module_utils.gpuchange_apt_look import BUILD_ROOM, MIB, STORE, free_bytes
from ansible.module_utils.gpuchange_dkms import headers_problem
from ansible.module_utils.gpuchange_dnf_call import ask
from ansible.module_utils.gpuchange_dnf_choice import RpmChoice, choose, driver_numbers
from ansible.module_utils.gpuchange_driver import driver_state
from ansible.module_utils.gpuchange_host import is_executable, run
from ansible.module_utils.gpuchange_packages import alternatives
from ansible.module_utils.gpuchange_rpm import installed, is_rpm_stack, lock_text, locks, upstream, working
from ansible.module_utils.gpuchange_runfile_look import run_problem

CACHES = "/var/cache/dnf/*/packages/*.rpm"
AUTOMATIC = ("dnf-automatic.timer", "dnf-automatic-install.timer")


def examine(wanted: Dict[str, str], offered: List[Dict[str, Any]], cache: str) -> Dict[str, Any]:
    """The preflight report's body: choice, transaction, what is in the way (problems) and worth knowing (findings)."""
    rows = installed()
    stack = {key: row["version"] for key, row in rows.items() if is_rpm_stack(row["name"])}
    state = driver_state()
    records = {(row["name"], row["version"]): row for row in offered}
    offer: Dict[str, Dict[str, Dict[str, Any]]] = {}
    for row in offered:
        offer.setdefault(row["name"], {})[row["version"]] = row
    choice = choose(wanted, offer, stack)
    moves, why = _simulate(choice, cache)
    sizes = _sizes(moves, records)
    problems = choice.problems + _problems(rows, choice, moves, why, state) + _space(sizes, moves)
    driver = upstream(choice.install[choice.mains["driver"]]) if "driver" in choice.mains else ""
    return {
        "as_wanted": not problems and not moves and driver in ("", state["loaded"]),
        "before": {part: _now(part, name, stack, state) for part, name in choice.mains.items()},
        "after": {part: upstream(choice.install[name]) for part, name in choice.mains.items()},
        "moves": moves,
        "transaction": {
            "install": {move["name"]: move["to"] for move in moves if move["to"]},
            "remove": sorted(move["name"] for move in moves if not move["to"]),
            "renamed": {},
            "mains": choice.mains,
            "driver": driver,
        },
        "reboot_needed": bool(driver) and driver != state["loaded"] and bool(moves or state["loaded"]),
        "driver": state,
        "sizes": sizes,
        "not_obtainable": _not_obtainable(moves, records),
        "problems": problems,
        "findings": _findings(choice, moves, stack, state),
    }


def _simulate(choice: RpmChoice, cache: str) -> Any:
    if choice.problems:
        return [], ""
    said = ask({"do": "simulate", "install": choice.install, "remove": [], "cache": cache})
    return said.get("moves", []), str(said.get("error", ""))


def _now(part: str, name: str, stack: Dict[str, str], state: Dict[str, Any]) -> str:
    numbers = list(driver_numbers(stack))
    if part == "driver":
        return str(state["loaded"] or (numbers[0] if len(numbers) == 1 else ""))
    return upstream(stack[name]) if name in stack else ""


def _problems(
    rows: Dict[str, Any], choice: RpmChoice, moves: List[Dict[str, str]], why: str, state: Dict[str, Any]
) -> List[str]:
    twice = sorted("%s (%s)" % (key, row["version"]) for key, row in rows.items() if row["status"] != "installed")
    found = [
        "packages are there twice, an update was interrupted: %s; run dnf remove --duplicates" % ", ".join(twice[:5])
    ]
    problems = found if twice else []
    if why:
        problems.append("dnf cannot make this change: %s" % why)
    problems += [
        "beyond the plan, %s would go" % move["name"]
        for move in moves
        if not move["to"] and move["name"] not in choice.install
    ]
    held = locks(lock_text())
    problems += [
        "the version lock on %s stands in the way; the plan does not name it" % move["name"]
        for move in moves
        if move["name"] in held and move["name"] not in choice.install
    ]
    building = any("dkms" in move["name"] and move["to"] for move in moves)
    checks = [run_problem() if "driver" in choice.mains else ""]
    checks += [headers_problem(state["boot_kernel"]), gpuchange_secure_boot.problem()] if building else []
    busy = working()
    checks.append("rpm is in use by %s: let it finish, or end just that one" % busy if busy else "")
    return problems + [check for check in checks if check]


def _sizes(moves: List[Dict[str, str]], records: Dict[Any, Dict[str, Any]]) -> Dict[str, int]:
    def total(field: str, side: str) -> int:
        return sum(int(records.get((move["name"], move[side]), {}).get(field, 0)) for move in moves)

    return {
        "download": total("size", "to"),
        "keep": total("size", "from"),
        "installed": total("installed_size", "to"),
        "free_store": free_bytes(STORE),
        "free_usr": free_bytes("/usr"),
    }


def _space(sizes: Dict[str, int], moves: List[Dict[str, str]]) -> List[str]:
    if not moves:
        return []
    needs = (
        (STORE, sizes["download"] + sizes["keep"] + 64 * MIB, sizes["free_store"]),
        ("/usr", sizes["installed"] + BUILD_ROOM, sizes["free_usr"]),
    )
    return [
        "%s has %d MiB free, the change needs %d MiB" % (path, free // MIB, need // MIB)
        for path, need, free in needs
        if free < need
    ]


def _not_obtainable(moves: List[Dict[str, str]], records: Dict[Any, Dict[str, Any]]) -> List[str]:
    """Installed packages that a rollback would need and that no repository and no cache can bring back."""
    cached = cached_rpms()
    old = [(move["name"], move["from"]) for move in moves if move["from"]]
    return ["%s %s" % pair for pair in old if pair not in records and pair not in cached]


def cached_rpms() -> Dict[Any, str]:
    """{(name, version): file} of the packages that dnf has kept (keepcache)."""
    paths = sorted(glob.glob(CACHES))
    if not paths:
        return {}
    _, out, _ = run(["rpm", "-qp", "--nosignature", "--qf", "%{NAME}\\t%{EPOCHNUM}\\t%{VERSION}-%{RELEASE}\\n", *paths])
    lines = [line.split("\t") for line in out.splitlines()]
    return {
        (row[0], row[2] if row[1] == "0" else "%s:%s" % (row[1], row[2])): path
        for row, path in zip(lines, paths)
        if len(row) == 3 and os.path.isfile(path)
    }


def _findings(
    choice: RpmChoice, moves: List[Dict[str, str]], stack: Dict[str, str], state: Dict[str, Any]
) -> List[str]:
    named: Set[str] = set(choice.install)
    found = [
        "%s is locked: the lock is kept, at the plan's version" % name for name in locks(lock_text()) if name in named
    ]
    numbers = list(driver_numbers(stack))
    if state["loaded"] and len(numbers) == 1 and numbers[0] != state["loaded"]:
        found.append("baseline inconsistent: module %s loaded, userspace %s" % (state["loaded"], numbers[0]))
    new = [move["name"] for move in moves if not move["from"] and move["name"] not in named]
    if new:
        found.append("new dependencies come along: %s" % ", ".join(new))
    on = [unit for unit in AUTOMATIC if run(["systemctl", "is-active", "--quiet", unit])[0] == 0]
    if on:
        found.append("automatic upgrades are on (%s): blocked while the host is out of service" % ", ".join(on))
    link = alternatives().get("cuda", {})
    if "cuda" in choice.mains and link.get("mode") == "manual" and is_executable("update-alternatives"):
        found.append("active toolkit is %s, chosen by hand: it stays" % link["value"])
    return found
