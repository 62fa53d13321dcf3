"""Which packages make up the stack that a plan asks for: pure functions over what apt offers and what is installed.

Names are found in the lists, not made up: the shape that a host has (server or desktop, open or proprietary, with or
without fabric manager) is carried over to the wanted version.
"""

from __future__ import annotations

import re
from typing import Any, Dict, Iterable, List, Optional, Tuple

Record = Dict[str, Any]
"""One offered package: name, version, arch, depends [(name, op, version)], size, installed_size (bytes), offered."""

Installed = Dict[str, str]
"""{name: version}"""

DRIVER_FAMILY = re.compile(
    r"(lib)?nvidia-(?!container|cuda-|cudnn|docker|gds|prime).*|xserver-xorg-video-nvidia.*|libcuda1|libxnvctrl0"
    r"|firmware-nvidia-.*|cuda-drivers.*|nvlsm|libnvsdm.*|linux-(modules|objects|signatures)-nvidia-.*"
)
DRIVER_CORE = re.compile(
    r"nvidia-(driver|utils|dkms|kernel-(common|source|dkms|support|open-dkms)|compute-utils|headless|open|firmware)(-.*)?"
    r"|libnvidia-(compute|cfg1|decode|encode|extra|fbc1|gl)-.*|libcuda1|libnvidia-ml1|nvidia-(smi|alternative)"
)
ESSENTIAL = re.compile(
    r"(nvidia-(driver|utils|dkms|kernel|headless|fabricmanager|imex|open|smi)|libnvidia-(compute|nscq)|cuda-drivers).*"
)
DRIVER_MAINS = ("nvidia-driver-%s", "nvidia-driver-%s-server", "cuda-drivers-%s", "nvidia-driver")
DRIVER_VERSION = re.compile(r"\d{3}\.\d+(\.\d+)?")
MAIN_PATTERNS = (r"nvidia-driver(-\d{3}.*)?", r"nvidia-headless-.*", r"cuda-drivers.*", r"libnvidia-compute-.*", r".*")
RELATION = re.compile(r"([a-z0-9][a-z0-9.+-]*)(?::\w+)?(?:\s*\((<<|<=|=|>=|>>)\s*([^)]+)\))?")


def parse_show(text: str, native: str = "amd64") -> List[Record]:
    """`apt-cache show NAME...` → one record for each name and version, offered if some list (not just dpkg) has it.

    Packages of a foreign architecture are called name:arch, as dpkg and apt-get call them.
    """
    found: Dict[Tuple[str, str], Record] = {}
    for paragraph in text.split("\n\n"):
        fields = dict(re.findall(r"^([A-Za-z0-9-]+): (.*)$", paragraph, flags=re.M))
        if "Package" not in fields or "Version" not in fields:
            continue
        record = _record(fields, native)
        record = found.setdefault((record["name"], record["version"]), record)
        if fields.get("Filename"):
            record.update(offered=True, size=int(fields.get("Size", 0)), sha256=fields.get("SHA256", ""))
    return list(found.values())


def _record(fields: Dict[str, str], native: str) -> Record:
    depends = ",".join(fields.get(name, "") for name in ("Pre-Depends", "Depends"))
    arch = fields.get("Architecture", native)
    return {
        "name": fields["Package"] if arch in (native, "all") else "%s:%s" % (fields["Package"], arch),
        "version": fields["Version"],
        "arch": arch,
        "depends": [_relation(part) for part in depends.split(",") if part.strip()],
        "installed_size": int(fields.get("Installed-Size", 0)) * 1024,
        "size": 0,
        "sha256": "",
        "offered": False,
    }


def _relation(text: str) -> Tuple[str, str, str]:
    """The first alternative of one dependency."""
    match = RELATION.match(text.partition("|")[0].strip())
    return (match.group(1), match.group(2) or "", (match.group(3) or "").strip()) if match else ("", "", "")


def upstream(version: str) -> str:
    """A Debian version without epoch and revision: 1:570.172.08-0ubuntu1 → 570.172.08."""
    bare = version.partition(":")[2] if ":" in version else version
    return bare.rpartition("-")[0] or bare


def matches(wanted: str, version: str) -> bool:
    """Whether a Debian version is what the plan calls `wanted`: all of it, its upstream part, or the head of that."""
    bare = upstream(version)
    return wanted in (version, version.partition(":")[2], bare) or bare.startswith((wanted + ".", wanted + "+"))


class Offer:
    """What apt offers and prefers, looked up by name."""

    def __init__(self, records: Iterable[Record], candidates: Dict[str, str]) -> None:
        self.by_name: Dict[str, Dict[str, Record]] = {}
        for record in records:
            if record["offered"]:
                self.by_name.setdefault(record["name"], {})[record["version"]] = record
        self.candidates = candidates

    def versions(self, name: str, wanted: str) -> List[str]:
        return sorted(version for version in self.by_name.get(name, {}) if matches(wanted, version))

    def pick(self, name: str, wanted: str, like: str = "") -> Optional[str]:
        """The one version to take: the main package's build, else the only one there is, else apt's candidate."""
        found = self.versions(name, wanted)
        if like in found:
            return like
        if len(found) > 1:
            found = [version for version in found if version == self.candidates.get(name)]
        return found[0] if len(found) == 1 else None

    def why_not(self, name: str, wanted: str) -> str:
        found = self.versions(name, wanted)
        if found:
            said = "%s %s is ambiguous: %s are offered; write the one that is meant in the plan"
            return said % (name, wanted, ", ".join(found))
        others = ", ".join(sorted(self.by_name.get(name, {}))) or "none at all"
        return "%s %s is not offered by the host's package sources; offered: %s" % (name, wanted, others)


class Choice:
    """The packages to install at exact versions, those to remove, and what stands in the way."""

    def __init__(self) -> None:
        self.install: Dict[str, str] = {}
        self.remove: List[str] = []
        self.renamed: Dict[str, str] = {}
        self.mains: Dict[str, str] = {}
        self.problems: List[str] = []
        self.notes: List[str] = []

    def take(self, offer: Offer, name: str, wanted: str, like: str = "") -> bool:
        version = offer.pick(name, wanted, like)
        if version is None:
            self.problems.append(offer.why_not(name, wanted))
            return False
        self.install[name] = version
        return True


def choose(wanted: Dict[str, str], offer: Offer, installed: Installed) -> Choice:
    """The complete package set for `wanted` ({driver, cuda, cudnn, nccl, container_toolkit}; absent ones stay)."""
    choice = Choice()
    for component, select in (
        ("driver", _driver),
        ("cuda", _cuda),
        ("cudnn", _cudnn),
        ("nccl", _nccl),
        ("container_toolkit", _container_toolkit),
    ):
        if wanted.get(component):
            before = set(choice.install)
            select(choice, wanted, offer, installed)
            _close(choice, offer, [name for name in choice.install if name not in before])
    choice.remove = sorted(set(choice.remove) - set(choice.install))
    return choice


def _close(choice: Choice, offer: Offer, names: List[str]) -> None:
    """Add what the chosen packages need at a version of the same release, until nothing is added.

    NVIDIA's metapackages name each part as (>= its version in this release): without naming that very version apt would
    keep a newer part on a downgrade, and take the newest on an upgrade.
    """
    queue = list(names)
    while queue:
        name = queue.pop()
        record = offer.by_name[name][choice.install[name]]
        for needed, operator, version in record["depends"]:
            exact = _exact(offer, needed, operator, version)
            if exact and needed not in choice.install:
                choice.install[needed] = exact
                queue.append(needed)


def _exact(offer: Offer, name: str, operator: str, version: str) -> Optional[str]:
    if operator not in ("=", ">=") or name not in offer.by_name:
        return None
    found = [have for have in offer.by_name[name] if version in (have, upstream(have))]
    return offer.pick(name, version) if len(found) > 1 else (found or [None])[0]


# ------------------------------------------------------------------------------------------------ driver


def driver_set(installed: Installed) -> Dict[str, str]:
    """{name: version} of the installed driver: its core packages and all others of the same upstream version."""
    core = {name: version for name, version in installed.items() if DRIVER_CORE.fullmatch(name)}
    numbers = {upstream(version) for version in core.values()}
    branches = {number.partition(".")[0] for number in numbers}
    return {
        name: version
        for name, version in installed.items()
        if name in core
        or (DRIVER_FAMILY.fullmatch(name) and (upstream(version) in numbers or _branch_token(name) in branches))
    }


def installed_driver(installed: Installed) -> str:
    """The upstream version of the installed driver; "" when there is none or it is mixed."""
    numbers = driver_numbers(installed)
    return next(iter(numbers)) if len(numbers) == 1 else ""


def driver_numbers(installed: Installed) -> Dict[str, List[str]]:
    """{upstream version: core packages of that version}; more than one version is a mixed, broken set."""
    found: Dict[str, List[str]] = {}
    for name, version in sorted(installed.items()):
        number = upstream(version)
        if DRIVER_CORE.fullmatch(name) and DRIVER_VERSION.fullmatch(number):
            found.setdefault(number, []).append("%s %s" % (name, version))
    return found


def _branch_token(name: str) -> str:
    match = re.search(r"-(\d{3})(?=[-:]|$)", name)
    return match.group(1) if match else ""


def _driver(choice: Choice, wanted: Dict[str, str], offer: Offer, installed: Installed) -> None:
    numbers = driver_numbers(installed)
    if len(numbers) > 1:
        table = "; ".join("%s: %s" % (number, ", ".join(names)) for number, names in numbers.items())
        choice.problems.append("the installed driver is a mix of versions (%s); mend it first" % table)
        return
    version = wanted["driver"]
    if "." not in version:
        said = "driver %s is a branch, not a version: write the one that is meant in the plan, for example %s.86.10"
        choice.problems.append(said % (version, version))
        return
    old = driver_set(installed)
    if old:
        _carry_over(choice, version, offer, old, next(iter(numbers), ""))
    else:
        _fresh_driver(choice, version, offer)


def _fresh_driver(choice: Choice, version: str, offer: Offer) -> None:
    branch = version.partition(".")[0]
    names = [template % branch if "%s" in template else template for template in DRIVER_MAINS]
    name = next((name for name in names if offer.versions(name, version)), names[0])
    if choice.take(offer, name, version):
        choice.mains["driver"] = name


def _carry_over(choice: Choice, version: str, offer: Offer, old: Dict[str, str], number: str) -> None:
    """Each installed package of the driver → its counterpart in the wanted version."""
    branch, main = version.partition(".")[0], main_of(old)
    new_main = _renamed(main, number, version, branch)
    if not choice.take(offer, new_main, version):
        return
    choice.mains["driver"], like = new_main, choice.install[new_main]
    for name in sorted(old):
        new = _renamed(name, number, upstream(like), branch)
        if offer.versions(new, version):
            choice.take(offer, new, version, like)
        elif _branch_token(new) and upstream(old[name]) != number and offer.candidates.get(new):
            choice.install[new] = offer.candidates[new]  # versioned with the kernel, not with the driver
        elif ESSENTIAL.fullmatch(name):
            choice.problems.append("%s; %s %s will not work with it" % (offer.why_not(new, version), name, old[name]))
        elif new == name:
            choice.notes.append("%s stays at %s" % (name, old[name]))
            continue
        else:
            choice.notes.append("%s has no counterpart in branch %s and goes" % (name, branch))
        if new != name:
            choice.remove.append(name)
            choice.renamed[name] = new


def main_of(old: Dict[str, str]) -> str:
    """The metapackage that stands for the driver; the shortest name where there are several."""
    for pattern in MAIN_PATTERNS:
        found = sorted((name for name in old if re.fullmatch(pattern, name)), key=lambda name: (len(name), name))
        if found:
            return found[0]
    return ""


def _renamed(name: str, number: str, new_number: str, branch: str) -> str:
    name = name.replace(number, new_number) if number else name
    old_branch = number.partition(".")[0]
    return re.sub(r"-%s(?=[-:]|$)" % re.escape(old_branch), "-" + branch, name) if old_branch else name


# ------------------------------------------------------------------------------- CUDA, cuDNN, containers


def _cuda(choice: Choice, wanted: Dict[str, str], offer: Offer, installed: Installed) -> None:
    """A toolkit of another release lies beside the old one; the old one stays."""
    parts = wanted["cuda"].split(".")
    if len(parts) < 2:
        choice.problems.append("cuda %s names no release; write for example 12.8.1" % wanted["cuda"])
        return
    name = "cuda-toolkit-%s-%s" % (parts[0], parts[1])
    if choice.take(offer, name, wanted["cuda"]):
        choice.mains["cuda"] = name
    kept = [other for other in sorted(installed) if re.fullmatch(r"cuda-toolkit-\d+-\d+", other) and other != name]
    choice.notes += ["%s %s stays installed beside it" % (other, installed[other]) for other in kept]


def _cudnn(choice: Choice, wanted: Dict[str, str], offer: Offer, installed: Installed) -> None:
    major = wanted["cudnn"].partition(".")[0]
    built_for = cuda_major(wanted, installed)
    if not built_for and int(major) >= 9:
        choice.problems.append("cudnn %s: which CUDA it is for is not known; name cuda in the plan" % wanted["cudnn"])
        return
    main = "libcudnn%s-cuda-%s" % (major, built_for) if int(major) >= 9 else "libcudnn%s" % major
    if not choice.take(offer, main, wanted["cudnn"]):
        return
    choice.mains["cudnn"] = main
    family = re.compile(r"(lib)?cudnn%s(-.*)?" % major)
    for name in sorted(installed):
        if family.fullmatch(name) and name != main and offer.by_name.get(name):
            choice.take(offer, name, wanted["cudnn"], choice.install[main])


def cuda_major(wanted: Dict[str, str], installed: Installed) -> str:
    if wanted.get("cuda"):
        return wanted["cuda"].partition(".")[0]
    for pattern in (r"libcudnn\d+-cuda-(\d+)", r"cuda-toolkit-(\d+)-\d+"):
        found = [match.group(1) for match in (re.fullmatch(pattern, name) for name in installed) if match]
        if found:
            return max(found, key=int)
    return ""


def _container_toolkit(choice: Choice, wanted: Dict[str, str], offer: Offer, installed: Installed) -> None:
    main = "nvidia-container-toolkit"
    if not choice.take(offer, main, wanted["container_toolkit"]):
        return
    choice.mains["container_toolkit"] = main
    like = choice.install[main]
    for name in sorted(installed):
        family = re.fullmatch(r"(lib)?nvidia-container-?.*", name) and name != main
        if family and offer.versions(name, wanted["container_toolkit"]):
            choice.take(offer, name, wanted["container_toolkit"], like)


def _nccl(choice: Choice, wanted: Dict[str, str], offer: Offer, installed: Installed) -> None:
    """NCCL's builds differ in the CUDA release they are for: 2.26.2-1+cuda12.8."""
    release = re.match(r"\d+\.\d+", wanted.get("cuda", ""))
    builds = [
        v for v in offer.versions("libnccl2", wanted["nccl"]) if release and v.endswith("+cuda" + release.group())
    ]
    if not choice.take(offer, "libnccl2", wanted["nccl"], builds[0] if len(builds) == 1 else ""):
        return
    choice.mains["nccl"] = "libnccl2"
    if "libnccl-dev" in installed:
        choice.take(offer, "libnccl-dev", wanted["nccl"], choice.install["libnccl2"])
