"""A lab's network: one bridge, one cable a host, no way out; and the one kernel limit many hosts need."""

from __future__ import annotations

import json
from pathlib import Path

from gpuchange.errors import LabError
from gpuchange.lab import state
from gpuchange.lab.tools import sh

# each systemd in a guest takes several inotify instances; the default of 128 ends at about 20 hosts
INOTIFY = Path("/proc/sys/fs/inotify/max_user_instances")
INOTIFY_WANTED = 1024


def links() -> set[str]:
    return {path.name for path in Path("/sys/class/net").iterdir()}


def free_index(taken: set[int]) -> int:
    """The lowest lab number that no lab and no bridge of this machine uses."""
    present = links()
    for index in range(1, 251):
        if index not in taken and f"gcl{index}" not in present:
            return index
    raise LabError("250 labs are up already", remedy="gpuchange lab down --name NAME")


def create_bridge(spec: state.LabSpec) -> None:
    if spec.bridge in links():
        return
    sh(["ip", "link", "add", spec.bridge, "type", "bridge", "forward_delay", "0"])
    sh(["ip", "address", "add", f"{spec.gateway}/24", "dev", spec.bridge])
    # nodad: no address of ours may wait a second for duplicates on a bridge of our own
    sh(["ip", "address", "add", f"fd88:{spec.index:x}::1/64", "dev", spec.bridge, "nodad"], check=False)
    sh(["ip", "link", "set", spec.bridge, "up"])


def remove_bridge(spec: state.LabSpec) -> None:
    for host in spec.hosts:
        remove_cable(cable(spec, host))
    if spec.bridge in links():
        sh(["ip", "link", "delete", spec.bridge])


def cable(spec: state.LabSpec, host: state.HostSpec) -> str:
    return f"vb-{spec.machine(host)}"


def remove_cable(name: str) -> None:
    if name in links():
        sh(["ip", "link", "delete", name], check=False)


def plug(name: str, plugged: bool) -> None:
    sh(["ip", "link", "set", name, "up" if plugged else "down"])


def _saved() -> Path:
    return state.root() / "sysctl.json"


def raise_limits() -> None:
    """Raise the inotify limit if it is low, and remember what it was."""
    now = int(INOTIFY.read_text())
    if now < INOTIFY_WANTED:
        _saved().write_text(json.dumps({"max_user_instances": now}))
        INOTIFY.write_text(str(INOTIFY_WANTED))


def restore_limits() -> None:
    if _saved().exists():
        INOTIFY.write_text(str(json.loads(_saved().read_text())["max_user_instances"]))
        _saved().unlink()
