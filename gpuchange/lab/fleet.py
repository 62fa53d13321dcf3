"""A lab as a whole: up, down, its hosts and its load balancer. Tests and the CLI use it through `Lab`."""

from __future__ import annotations

import contextlib
import shutil
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuchange.errors import LabError
from gpuchange.lab import cgroups, disk, hosts, image, network, orders, pool, state
from gpuchange.lab.host import Host
from gpuchange.lab.tools import require_machine
from gpuchange.waiting import wait_until

Say = Callable[[str], None]
START = "start"


def _quiet(_: str) -> None:
    return


@dataclass(frozen=True)
class Lab:
    """A running lab."""

    spec: state.LabSpec

    @classmethod
    def up(
        cls, name: str = "lab", hosts: int = 3, gpus: int = 2, *, say: Say = _quiet, install_tools: bool = False
    ) -> Lab:
        """Build what is missing, start every host, and return when all serve. Safe to call again.

        Hosts with a staged fault are left as they are. Raises LabError when the machine cannot carry a lab, or
        a lab of that name but another size is up.
        """
        state.check_name(name)
        layout = state.plan_hosts(hosts)
        require_machine(install_tools=install_tools)
        with state.locked(f"lab-{name}"):
            lab = cls(_claim(name, layout, gpus))
            try:
                lab._build(say)
            except BaseException:
                if not orders.daemon_pid(lab.spec):  # it never ran: leave nothing of it
                    lab._remove()
                raise
            lab._start(say)
        return lab

    @classmethod
    def load(cls, name: str = "lab") -> Lab:
        """A lab that is up already. Raises LabError when there is none of that name."""
        return cls(state.load(name))

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def inventory(self) -> Path:
        """Ansible inventory file: groups gpu_hosts and loadbalancers."""
        return self.spec.directory / "inventory.yaml"

    @property
    def lb_url(self) -> str:
        return f"http://{self.host('lb1').address}"

    @property
    def hosts(self) -> list[Host]:
        return [Host(self.spec, layout) for layout in self.spec.hosts]

    @property
    def gpu_hosts(self) -> list[Host]:
        return [host for host in self.hosts if host.layout.role == "gpu"]

    def host(self, name: str) -> Host:
        return Host(self.spec, self.spec.find(name))

    def status(self) -> dict[str, Any]:
        """{"hosts": {name: see Host.status}, "pid": of the power daemon}. Raises LabError if that is not running."""
        return orders.order(self.spec, "status")

    def haproxy(self, command: str) -> str:
        """Send one line to HAProxy's runtime API on lb1, from outside, and return the answer."""
        door = f"/proc/{self.host('lb1').leader}/root/run/haproxy/admin.sock"
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(10)
            connection.connect(door)
            connection.sendall(command.encode() + b"\n")
            return b"".join(iter(lambda: connection.recv(65536), b"")).decode()

    def serving(self) -> dict[str, str]:
        """HAProxy's word on every GPU host: UP, DOWN, DRAIN, MAINT and so on."""
        rows = (line.split(",") for line in self.haproxy("show stat").splitlines())
        return {row[1]: row[17] for row in rows if row[0] == "gpu" and row[1] != "BACKEND"}

    def wait_serving(self, names: list[str] | None = None, timeout: float = 60) -> None:
        """Wait until HAProxy calls the named hosts (default: every GPU host) UP."""
        wanted = names if names is not None else [host.name for host in self.gpu_hosts]

        def all_up() -> bool:
            with contextlib.suppress(OSError, IndexError):  # HAProxy is not listening yet
                found = self.serving()
                return all(found.get(name) == "UP" for name in wanted)
            return False

        wait_until(all_up, timeout=timeout, what=f"HAProxy to call {', '.join(wanted)} up", interval=0.1)

    def snapshot(self, label: str) -> None:
        """Keep every host's tree under `label`."""
        for host in self.hosts:
            host.snapshot(label)

    def restore(self, label: str = START) -> None:
        """Put every host back to `label` (`start` is the state before its first boot) and wait until all serve."""
        with ThreadPoolExecutor(len(self.hosts)) as each:
            list(each.map(lambda host: host.restore(label), self.hosts))
        self.wait_serving()

    def down(self) -> None:
        """End every host and remove all that `up` made, except the images other labs start from."""
        with state.locked(f"lab-{self.name}"):
            self._remove()

    def _build(self, say: Say) -> None:
        spec = self.spec
        (spec.directory / "logs").mkdir(exist_ok=True)
        with state.locked("labs"):
            pool.mount()
            network.raise_limits()
        with state.locked("images"):
            repository, base, gpu = image.build_all(say)
            hosts.make_keys(spec)
            for host in self.hosts:
                if not host.root.exists():
                    hosts.lay_out(spec, host.layout, gpu if host.layout.role == "gpu" else base)
                    host.snapshot(START)
        hosts.write_inventory(spec)
        network.open_bridge(spec)
        if not orders.daemon_pid(spec):
            orders.start_daemon(spec, repository)

    def _start(self, say: Say) -> None:
        whole = [host for host in self.hosts if not host.staged_faults()]
        say(f"starting {len(whole)} of {len(self.hosts)} hosts")
        for host in whole:
            host.power("on")
        for host in whole:
            host.wait_ready()
        self.wait_serving([host.name for host in whole if host.layout.role == "gpu"])

    def _remove(self) -> None:
        spec = self.spec
        # another lab may have got the number after a restart of the machine: nothing of that one is ours to end
        if network.owner(spec.bridge) in ("", str(spec.directory)):
            orders.stop_daemon(spec)
            network.remove_bridge(spec)
            cgroups.remove(spec.bridge)
        for host in self.hosts:
            disk.discard(disk.stand_in(host))
        with state.locked("labs"):
            with contextlib.suppress(LabError):  # it cannot be mounted: then `up` failed for that very reason
                pool.mount()
            if pool.mounted():
                pool.delete_tree(spec.subvolumes)
            shutil.rmtree(spec.directory, ignore_errors=True)
            if not state.all_labs():
                network.restore_limits()
                pool.unmount()


def build(*, say: Say = _quiet, install_tools: bool = False) -> None:
    """Build the images without starting a lab, so that the first `up` is as quick as any other."""
    require_machine(install_tools=install_tools)
    with state.locked("labs"):
        pool.mount()
        with state.locked("images"):
            image.build_all(say)
        if not state.all_labs():
            pool.unmount()


def purge() -> None:
    """Remove the images and everything else under the lab's directory. Raises LabError while a lab is up."""
    with state.locked("labs"):
        up = [spec.name for spec in state.all_labs()]
        if up:
            raise LabError(
                f"the images are in use by: {', '.join(up)}", remedy=f"gpuchange lab down --name {up[0]} --purge"
            )
        pool.unmount()
        image.purge()
    shutil.rmtree(state.root(), ignore_errors=True)


def _claim(name: str, layout: tuple[state.HostSpec, ...], gpus: int) -> state.LabSpec:
    """The lab's description, newly numbered unless it is up already."""
    with state.locked("labs"):
        if state.exists(name):
            spec = state.load(name)
            if (spec.hosts, spec.gpus) != (layout, gpus):
                raise LabError(
                    f"lab {name} is up with {len(spec.hosts) - 1} GPU hosts of {spec.gpus} cards",
                    remedy=f"use another --name, or first: gpuchange lab down --name {name}",
                )
        else:
            taken = {spec.index for spec in state.all_labs()}
            index = network.claim_index(state.root() / "labs" / name, taken)
            spec = state.LabSpec(name, index, gpus, layout)
            state.save(spec)
    return spec
