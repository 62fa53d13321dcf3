"""Faults to stage on a host, each undone by its own mend.

Those of power, cable and disk are here; those inside a guest come from the GPU simulation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpuchange.errors import LabError
from gpuchange.lab import disk
from gpuchange.lab.gpu.faults import FAULTS as GPU_FAULTS

if TYPE_CHECKING:
    from gpuchange.lab.host import Host

Action = Callable[["Host"], object]


@dataclass(frozen=True)
class Fault:
    """What `lab break` stages: one sentence, and two actions that may be called twice without harm."""

    summary: str
    apply: Action
    mend: Action


def _power_back(host: Host) -> None:
    host.power("on")
    host.wait_ready()


def _ssh_down(host: Host) -> None:
    host.run(["systemctl", "mask", "--now", "ssh.service"])


def _ssh_back(host: Host) -> None:
    host.run(["systemctl", "unmask", "ssh.service"])
    host.run(["systemctl", "start", "ssh.service"])


OWN: Mapping[str, Fault] = {
    "hang": Fault(
        "every process of the host stops; its address still answers pings",
        lambda host: host.freeze(),
        lambda host: host.thaw(),
    ),
    "network-cut": Fault(
        "the network cable is pulled, also over reboots", lambda host: host.unplug(), lambda host: host.plug()
    ),
    "power-cut": Fault("the power is cut at once and stays off", lambda host: host.power("cut"), _power_back),
    "disk-full": Fault("/var has not a byte left, also over reboots", disk.fill, disk.free),
    "ssh-down": Fault("sshd is stopped and kept from starting", _ssh_down, _ssh_back),
}


def _inside(name: str) -> Fault:
    """A fault of the GPU simulation: it needs no more than a way to run commands in the guest."""
    fault = GPU_FAULTS[name]
    return Fault(fault.sentence, lambda host: fault.apply(host.run), lambda host: fault.mend(host.run))


def catalogue() -> dict[str, Fault]:
    """All faults by name."""
    return {**OWN, **{name: _inside(name) for name in GPU_FAULTS}}


def find(name: str) -> Fault:
    known = catalogue()
    if name not in known:
        raise LabError(f"there is no fault {name!r}", remedy=f"known faults: {', '.join(sorted(known))}")
    return known[name]


def _record(host: Host) -> Path:
    return host.spec.directory / "faults" / f"{host.name}.json"


def staged(host: Host) -> list[str]:
    """Names of the faults staged on the host and not mended yet, oldest first."""
    record = _record(host)
    return list(json.loads(record.read_text())) if record.exists() else []


def stage(host: Host, name: str) -> None:
    fault = find(name)
    # noted before it is done: a half-staged fault must be mendable too
    _note(host, [*(each for each in staged(host) if each != name), name])
    fault.apply(host)


def mend(host: Host, name: str) -> None:
    find(name).mend(host)
    _note(host, [each for each in staged(host) if each != name])


def reset(host: Host) -> None:
    """Forget the faults of a host whose tree is replaced by a snapshot; call while its power is cut."""
    disk.discard(disk.stand_in(host))
    host.plug()
    host.set_binds([])
    _note(host, [])


def _note(host: Host, names: list[str]) -> None:
    record = _record(host)
    record.parent.mkdir(exist_ok=True)
    record.write_text(json.dumps(names))
