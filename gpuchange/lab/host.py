"""One host of a lab as an object: its power, cable and disk, and commands inside it."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gpuchange.errors import LabError
from gpuchange.lab import faults, hosts, pool, state
from gpuchange.lab.orders import order
from gpuchange.waiting import wait_until

Switch = Literal["on", "off", "cut", "cycle"]
GUEST_ENVIRONMENT = (
    "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME=/root",
    "LC_ALL=C.UTF-8",
)


@dataclass(frozen=True)
class Host:
    """One host of a lab, seen from the machine that carries it."""

    spec: state.LabSpec
    layout: state.HostSpec

    @property
    def name(self) -> str:
        return self.layout.name

    @property
    def address(self) -> str:
        return self.spec.address(self.layout)

    @property
    def root(self) -> Path:
        """The host's file tree as seen from outside, running or not."""
        return self.spec.tree(self.layout)

    def status(self) -> dict[str, Any]:
        """power ("on" or "off"), leader (pid of its init, 0 = none), frozen, plugged, boots (since lab up)."""
        status: dict[str, Any] = order(self.spec, "status")["hosts"][self.name]
        return status

    @property
    def boots(self) -> int:
        """How often it started since lab up, reboots included."""
        return int(self.status()["boots"])

    @property
    def leader(self) -> int:
        """Process id of the host's init as seen from outside. Raises LabError when the host is off."""
        leader = int(self.status()["leader"])
        if not leader:
            raise LabError(
                "the host is off", where=self.name, remedy=f"gpuchange lab power --name {self.spec.name} {self.name} on"
            )
        return leader

    def run(self, command: Sequence[str], *, check: bool = True, timeout: float = 120, stdin: str | None = None) -> str:
        """Run a command inside, past the network, and return its standard output.

        Raises LabError when the host is off, the command takes longer than `timeout` seconds, or fails and `check`.
        """
        enter = ["nsenter", "-t", str(self.leader), "-m", "-u", "-i", "-n", "-p", "--root", "--wd=/"]
        try:
            done = subprocess.run(
                [*enter, "env", "-i", *GUEST_ENVIRONMENT, *command],
                capture_output=True, text=True, errors="replace", timeout=timeout,
                input="" if stdin is None else stdin,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise LabError(f"`{' '.join(command)}` did not end within {timeout:g} s", where=self.name) from error
        if check and done.returncode:
            raise LabError(
                f"`{' '.join(command)}` failed with exit code {done.returncode}",
                where=self.name,
                why=(done.stderr.strip() or done.stdout.strip())[-1500:],
            )
        return done.stdout

    def ssh(self, *command: str) -> list[str]:
        """The ssh command line that reaches this host as controllers do."""
        known = f"UserKnownHostsFile={hosts.known_hosts(self.spec)}"
        key = str(hosts.client_key(self.spec))
        options = ["-F", "none", "-i", key, "-o", known, "-o", "IdentitiesOnly=yes", "-o", "ConnectTimeout=10"]
        return ["ssh", *options, f"root@{self.address}", *command]

    def power(self, switch: Switch) -> None:
        """on; off = shutdown by the power button; cut = at once; cycle = cut, then on. Does not wait for ssh."""
        order(self.spec, switch, self.name)

    def freeze(self) -> None:
        order(self.spec, "freeze", self.name)

    def thaw(self) -> None:
        order(self.spec, "thaw", self.name)

    def unplug(self) -> None:
        order(self.spec, "unplug", self.name)

    def plug(self) -> None:
        order(self.spec, "plug", self.name)

    def set_binds(self, binds: Iterable[str]) -> None:
        """Extra nspawn --bind values, in force from the next power-on."""
        order(self.spec, "set-binds", self.name, binds=list(binds))

    def wait_ready(self, timeout: float = 60) -> None:
        """Wait until sshd answers with its banner."""
        wait_until(self.ssh_answers, timeout=timeout, what=f"{self.name} to answer on port 22", interval=0.1)

    def ssh_answers(self) -> bool:
        try:
            with socket.create_connection((self.address, 22), timeout=1) as connection:
                connection.settimeout(1)
                return connection.recv(4) == b"SSH-"
        except OSError:
            return False

    def snapshot(self, label: str) -> None:
        """Keep the host's tree as it is this moment under `label`, replacing an older one of that name."""
        target = self.spec.snapshot(self.layout, label)
        pool.delete(target)
        pool.snapshot(self.root, target)

    def restore(self, label: str) -> None:
        """Cut the power, put back the tree kept under `label`, power on, wait for ssh. Staged faults are gone."""
        kept = self.spec.snapshot(self.layout, label)
        if not kept.exists():
            raise LabError(f"there is no snapshot {label!r}", where=self.name)
        self.power("cut")
        pool.delete(self.root)
        pool.snapshot(kept, self.root)
        faults.reset(self)
        self.power("on")
        self.wait_ready()

    def break_(self, fault: str) -> None:
        """Stage a fault by name. Raises LabError when there is none of that name."""
        faults.stage(self, fault)

    def mend(self, fault: str) -> None:
        faults.mend(self, fault)

    def staged_faults(self) -> list[str]:
        return faults.staged(self)
