"""Versions that a plan leaves open ("auto"): the newest offered one in the ranges that the controller gives. Pure."""

from __future__ import annotations

import re
from typing import Dict, List, Tuple

from ansible.module_utils.gpuchange_apt_choice import (
    DRIVER_MAINS,
    DRIVER_VERSION,
    Installed,
    Offer,
    cuda_major,
    driver_set,
    installed_driver,
    main_of,
    upstream,
)

Ranges = List[List[str]]
"""[[first, end], ...]: versions from `first` on and below `end`; "" for no end."""

AUTO = "auto"


class Opened:
    """`wanted` without "auto"; `chosen` {component: version}; `offered` {component: number of versions looked at}."""

    def __init__(self, wanted: Dict[str, str]) -> None:
        self.wanted = {part: version for part, version in wanted.items() if version != AUTO}
        self.chosen: Dict[str, str] = {}
        self.offered: Dict[str, int] = {}
        self.problems: List[str] = []


def close_open(wanted: Dict[str, str], fits: Dict[str, Ranges], offer: Offer, installed: Installed) -> Opened:
    """Put the newest fitting version in for each "auto"; never one older than what is installed."""
    opened = Opened(wanted)
    for part, look in (("driver", driver_versions), ("cudnn", cudnn_versions)):
        if wanted.get(part) != AUTO:
            continue
        offered, now = look(opened.wanted, offer, installed)
        fitting = [version for version in offered if inside(version, fits.get(part, []))]
        best = max(fitting, key=numbers) if fitting else ""
        why = _why_not(part, offered, best, now)
        if why:
            opened.problems.append(why)
            continue
        opened.wanted[part] = opened.chosen[part] = best
        opened.offered[part] = len(offered)
    return opened


def _why_not(part: str, offered: List[str], best: str, now: str) -> str:
    shown = ", ".join(sorted(offered, key=numbers)) or "none at all"
    if not best:
        return "%s auto: no offered version is known to fit this host (offered: %s); name one in the plan" % (
            part,
            shown,
        )
    if now and numbers(now) > numbers(best):
        said = "%s auto: %s is installed, the newest offered that is known to fit is %s; name a version in the plan"
        return said % (part, now, best)
    return ""


def driver_versions(_wanted: Dict[str, str], offer: Offer, installed: Installed) -> Tuple[List[str], str]:
    """(driver versions offered in the shape that the host has: server or desktop, open or not; the installed one)."""
    main = main_of(driver_set(installed))
    shapes = [re.sub(r"\\-\d{3}(?=\\-|$)", r"\\-\\d{3}", re.escape(main))] if main else _fresh_shapes()
    for shape in shapes:
        versions = {
            upstream(version) for name in offer.by_name if re.fullmatch(shape, name) for version in offer.by_name[name]
        }
        found = sorted(version for version in versions if DRIVER_VERSION.fullmatch(version))
        if found:
            return found, installed_driver(installed)
    return [], installed_driver(installed)


def _fresh_shapes() -> List[str]:
    return [re.escape(template).replace("%s", r"\d{3}") for template in DRIVER_MAINS]


def cudnn_versions(wanted: Dict[str, str], offer: Offer, installed: Installed) -> Tuple[List[str], str]:
    """(cuDNN versions offered for the CUDA of the plan, else of the host; the installed one for it)."""
    major = cuda_major(wanted, installed)
    named = re.compile(r"libcudnn\d+-cuda-%s" % major)
    older = re.compile(r".*\+cuda%s\.\d+" % major)  # cuDNN 8: the CUDA stands in the version, not in the name
    found = {
        upstream(version)
        for name, versions in offer.by_name.items()
        for version in versions
        if named.fullmatch(name) or (re.fullmatch(r"libcudnn\d+", name) and older.fullmatch(version))
    }
    now = [upstream(version) for name, version in installed.items() if named.fullmatch(name)]
    return sorted(found), max(now, key=numbers) if now else ""


def numbers(version: str) -> List[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def inside(version: str, ranges: Ranges) -> bool:
    return any(
        numbers(version) >= numbers(first) and (not end or numbers(version) < numbers(end)) for first, end in ranges
    )
