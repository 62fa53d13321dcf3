"""Is the installed GPU stack one set? Packages of one driver by exact version and by where they come from. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_DRIVER_PART = re.compile(
    r"(nvidia-(driver|utils|dkms|kernel-(common|source|open|dkms|support|open-dkms)|compute-utils|headless|smi"
    r"|alternative|open|firmware)|libnvidia-(compute|cfg1|decode|encode|extra|fbc1|gl|ml1)|libcuda1)"
    r"(-(bin|libs|libs-i386|no-dkms|server|open|\d{3})|:\w+)*"
)
_DRIVER_NUMBER = re.compile(r"\d{3}\.\d+(\.\d+)?")
_REBUILT = re.compile(r"\+b\d+$")


def driver_parts(packages: Mapping[str, str]) -> dict[str, str]:
    """{name: version} of the installed packages that are built together as one driver."""
    return {name: version for name, version in packages.items() if _DRIVER_PART.fullmatch(name) and _number(version)}


def _number(version: str) -> str:
    bare = version.rpartition(":")[2].rpartition("-")[0]
    return bare if _DRIVER_NUMBER.fullmatch(bare) else ""


def mixed(packages: Mapping[str, str], origins: Mapping[str, Any]) -> str:
    """The table of package, version, origin where a driver's packages are of several builds; "" where they are one set.

    Builds of one number from two sources count too: their relations to each other do not fit.
    """
    parts = driver_parts(packages)
    builds = {_REBUILT.sub("", version) for version in parts.values()}
    if len(builds) < 2:
        return ""
    rows = sorted(parts.items(), key=lambda row: (row[1], row[0]))
    return "; ".join(f"{name} {version} from {origins.get(name) or 'unknown'}" for name, version in rows)
