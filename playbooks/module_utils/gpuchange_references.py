"""Where this host's configuration names cards by UUID. Read-only, bounded; meaning is made on the controller."""

from __future__ import annotations

import glob
import os
import re
from typing import Any, Dict, Iterable, Iterator, List

from ansible.module_utils.gpuchange_look import read_text

PLACES = (
    "/etc/slurm/**/*.conf",
    "/etc/slurm-llnl/**/*.conf",
    "/etc/systemd/system/**/*.service",
    "/etc/systemd/system/**/*.conf",
    "/run/systemd/system/**/*.service",
    "/run/systemd/system/**/*.conf",
    "/usr/local/lib/systemd/system/**/*.service",
    "/etc/default/*",
    "/etc/sysconfig/*",
    "/etc/environment",
    "/etc/environment.d/*.conf",
    "/etc/profile.d/*.sh",
    "/etc/cdi/*",
    "/var/run/cdi/*",
    "/etc/docker/daemon.json",
    "/etc/containerd/**/*.toml",
    "/etc/containers/**/*.conf",
    "/etc/containers/systemd/*",
    "/etc/nvidia-container-runtime/*",
    "/etc/kubernetes/**/*.yaml",
)
COMPOSE = ("docker-compose.y*ml", "compose.y*ml", ".env")
HOMES = ("/opt/*", "/srv/*")
NAME = re.compile(r"\bGPU-[0-9A-Fa-f][0-9A-Fa-f-]{3,35}")
FILE_LIMIT = 1024 * 1024
MOST_FILES = 4000
MOST_FOUND = 500


def references(more: Iterable[str] = ()) -> List[Dict[str, Any]]:
    """[{name, file, line}] in the places where schedulers, units and container tools keep it, and in `more` files."""
    found: List[Dict[str, Any]] = []
    seen = set()
    for path in _files(more):
        real = os.path.realpath(path)  # /var/run is /run, and drop-ins are often links
        if real in seen:
            continue
        seen.add(real)
        found += _named_in(path)
        if len(seen) >= MOST_FILES or len(found) >= MOST_FOUND:
            break
    return found[:MOST_FOUND]


def _files(more: Iterable[str]) -> Iterator[str]:
    patterns = [*PLACES, *("%s/%s" % (home, name) for home in HOMES for name in COMPOSE)]
    for pattern in patterns:
        for path in sorted(glob.iglob(pattern, recursive=True)):
            if os.path.isfile(path):
                yield path
    for place in more:
        yield from _below(place)


def _below(place: str) -> Iterator[str]:
    if os.path.isfile(place):
        yield place
    for directory, _, names in os.walk(place):
        for name in sorted(names):
            yield os.path.join(directory, name)


def _named_in(path: str) -> List[Dict[str, Any]]:
    if os.path.isfile(path) and os.path.getsize(path) > FILE_LIMIT:
        return []
    lines = read_text(path, FILE_LIMIT).splitlines()
    return [
        {"name": name, "file": path, "line": number}
        for number, line in enumerate(lines, 1)
        for name in dict.fromkeys(match.rstrip("-") for match in NAME.findall(line))
    ]
