"""A change of one host, kept at its phase boundaries, so that a test can start from any of them.

A boundary is what would be left if host and controller went down together just before a play: the host's disk, the
state directory with the play's intent in it, and what the balancer knows and keeps of the host. It is taken while the
engine is stopped at a gate; the host's disk as a snapshot, so that it boots anew when the boundary is put back.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

from changes import servers
from crashing import Controller, Gate, kill_tree, make_home
from field import Field

from gpuchange.lab import Host

STEPS = (
    *("preflight/host", "preflight/haproxy", "preflight/apt", "record/host", "backup/packages", "drain/haproxy"),
    *("drain/gpu_users", "seal/host", "baseline/gpu", "stack/apt", "verify/host", "verify/gpu", "release/gpu_users"),
    *("release/haproxy", "watch/host", "owner_marker"),
)
"""What a change of one host plays, in order; a boundary is named after the play that would come next."""

KEPT = Path("var/lib/gpuchange")


@dataclass(frozen=True)
class Boundary:
    """The boundary before `step` of the change `change` of `host`; `kept` holds copies of state and balancer."""

    step: str
    change: str
    host: Host
    kept: Path
    admin: str  # the balancer's word on the host: ready, drain or maint

    @property
    def label(self) -> str:
        return f"before-{self.step.replace('/', '-').replace('_', '-')}"


def take(field: Field, host: Host, wanted: Container[str]) -> list[Boundary]:
    """Carry a change of the fresh `host` to its last wanted boundary and keep each wanted one; then kill it."""
    controller = field.controller("boundaries", host)
    last = [step for step in STEPS if step in wanted][-1]
    found: list[Boundary] = []
    with controller.running("apply", str(controller.directory / "plan.yaml"), "--yes") as process:
        while gate := controller.until(process, lambda gate: gate.step in wanted and gate.tasks != "probe"):
            if gate.step not in {boundary.step for boundary in found}:
                process.send_signal(signal.SIGSTOP)
                found.append(_keep(field, controller, gate, host))
                process.send_signal(signal.SIGCONT)
            if gate.step == last:
                kill_tree(controller, process)
                break
            gate.go()
    return found


def put_back(field: Field, boundary: Boundary) -> Controller:
    """Host, balancer and a state directory of their own as they were at the boundary; the host is up."""
    host, balancer = boundary.host, field.lab.host("lb1")
    directory = field.new_directory(f"from-{boundary.label}")
    controller = Controller(field.lab, directory, python=make_home(directory / "home"))
    shutil.copytree(boundary.kept / "state", controller.state, symlinks=True)
    host.restore(boundary.label)
    _forget(balancer, host, boundary.change)
    for path in (boundary.kept / "balancer").rglob("*"):
        if path.is_file():
            target = balancer.root / KEPT / path.relative_to(boundary.kept / "balancer")
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            shutil.copy2(path, target)
    field.lab.haproxy(f"set server gpu/{host.name} state {boundary.admin}")
    if boundary.admin == "ready":
        field.lab.wait_serving([host.name])
    return controller


def _keep(field: Field, controller: Controller, gate: Gate, host: Host) -> Boundary:
    kept = field.new_directory(f"kept-{gate.step.replace('/', '-')}")
    shutil.copytree(controller.state, kept / "state", symlinks=True)
    (kept / "balancer").mkdir()
    balancer = field.lab.host("lb1").root / KEPT
    for path in (balancer / f"owner-{host.name}.json", *(balancer / controller.id).glob("*")):
        if path.is_file():
            target = kept / "balancer" / path.relative_to(balancer)
            target.parent.mkdir(exist_ok=True)
            shutil.copy2(path, target)
    boundary = Boundary(gate.step, controller.id, host, kept, admin_state(field, host))
    host.snapshot(boundary.label)
    return boundary


def _forget(balancer: Host, host: Host, change: str) -> None:
    (balancer.root / KEPT / f"owner-{host.name}.json").unlink(missing_ok=True)
    shutil.rmtree(balancer.root / KEPT / change, ignore_errors=True)


def admin_state(field: Field, host: Host) -> str:
    """ready, drain or maint, as HAProxy's runtime API takes it."""
    row = next(line.split() for line in servers(field.lab) if line.startswith(f"{host.name} "))
    flags = int(row[3])  # srv_admin_state: 0x01 forced maintenance, 0x08 forced drain
    return "maint" if flags & 0x01 else "drain" if flags & 0x08 else "ready"
