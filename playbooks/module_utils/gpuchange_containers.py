"""Containers of a host and whether they see its GPUs, asked from inside each. Read-only, bounded."""

from __future__ import annotations

import os
from typing import Any, Dict, List

from ansible.module_utils.gpuchange_look import run

RUNTIMES = {
    "docker": ("/run/docker.pid", "/run/docker.sock"),
    "podman": ("/var/lib/containers/storage",),
    "nerdctl": ("/run/containerd/containerd.sock",),
}
"""Runtime → what must all be there for it to be asked: asking one that sleeps would wake it."""
FRESH = {
    "docker": ["--gpus", "all"],
    "podman": ["--device", "nvidia.com/gpu=all"],
    "nerdctl": ["--gpus", "all"],
}
MOST = 12
ASK_S = 6.0
FRESH_S = 30.0
ABSENT = ("executable file not found", "no such file or directory", "not found in $path")


def running() -> List[Dict[str, Any]]:
    """[{runtime, id, name, rc, says}] of the running containers that have an nvidia-smi inside."""
    rows = [(runtime, *line) for runtime in awake() for line in _listed(runtime)]
    asked = [_asked(runtime, ident, name) for runtime, ident, name in rows[:MOST]]
    return [row for row in asked if row]


def awake() -> List[str]:
    return [name for name, needs in RUNTIMES.items() if all(os.path.exists(path) for path in needs)]


def _listed(runtime: str) -> List[List[str]]:
    out = run([runtime, "ps", "--no-trunc", "--format", "{{.ID}} {{.Names}}"], ASK_S)["out"]
    return [line.split(None, 1) for line in out.splitlines() if len(line.split(None, 1)) == 2]


def _asked(runtime: str, ident: str, name: str) -> Dict[str, Any]:
    said = run([runtime, "exec", ident, "nvidia-smi", "-L"], ASK_S, 8192)
    text = (said["out"] + said["err"]).strip()
    if said["rc"] in (126, 127) or any(words in text.lower() for words in ABSENT):
        return {}
    return {"runtime": runtime, "id": ident, "name": name, "rc": said["rc"], "says": text[-400:]}


def fresh(image: str) -> Dict[str, Any]:
    """nvidia-smi in a new container of an image that the host has already: {runtime, rc, says}; no runtime: ""."""
    runtime = next(iter(awake()), "")
    if not runtime:
        return {"runtime": "", "rc": None, "says": "no container runtime runs on this host"}
    options = ["--rm", "--pull=never", "--network=none", *FRESH[runtime]]
    said = run([runtime, "run", *options, image, "nvidia-smi", "-L"], FRESH_S, 8192)
    return {"runtime": runtime, "rc": said["rc"], "says": (said["out"] + said["err"]).strip()[-400:]}
