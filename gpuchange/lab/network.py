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


def owner(bridge: str) -> str:
    """Whose bridge it is: the state directory of the lab that made it, "" when there is no such bridge."""
    try:
        return Path(f"/sys/class/net/{bridge}/ifalias").read_text().strip()
    except OSError:
        return ""


def claim_index(directory: Path, taken: set[int]) -> int:
    """Make a bridge gclN with the lowest free N for the lab in `directory`, and return N.

    Making the bridge is the claim: only the kernel knows all labs, for each may have its own state directory.
    """
    present = links()
    for index in range(1, 251):
        if index not in taken and f"gcl{index}" not in present and _claim(f"gcl{index}", directory):
            return index
    raise LabError("250 labs are up already", remedy="gpuchange lab down --name NAME")


def _claim(bridge: str, directory: Path) -> bool:
    try:
        sh(["ip", "link", "add", bridge, "type", "bridge", "forward_delay", "0"])
    except LabError:
        if bridge in links():  # somebody was faster
            return False
        raise
    sh(["ip", "link", "set", bridge, "alias", directory])
    return True


def open_bridge(spec: state.LabSpec) -> None:
    """Give the lab's bridge its addresses; made anew if the machine was restarted since `claim_index`."""
    if owner(spec.bridge) != str(spec.directory) and not _claim(spec.bridge, spec.directory):
        raise LabError(
            f"bridge {spec.bridge} of lab {spec.name} now belongs to {owner(spec.bridge) or 'somebody else'}",
            remedy=f"gpuchange lab down --name {spec.name}, then up again: it will take another number",
        )
    sh(["ip", "address", "replace", f"{spec.gateway}/24", "dev", spec.bridge])
    # nodad: no address of ours need wait a second for duplicates on a bridge of our own
    sh(["ip", "address", "replace", f"fd88:{spec.index:x}::1/64", "dev", spec.bridge, "nodad"], check=False)
    sh(["ip", "link", "set", spec.bridge, "up"])


def remove_bridge(spec: state.LabSpec) -> None:
    for host in spec.hosts:
        remove_link(cable(spec, host))
    remove_link(spec.bridge)


def cable(spec: state.LabSpec, host: state.HostSpec) -> str:
    return f"vb-{spec.machine(host)}"


def remove_link(name: str) -> None:
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
