"""A lab as a whole: up, down, and its hosts as objects. This is the Python interface tests and the CLI use."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gpuchange.errors import LabError
from gpuchange.lab import cgroups, disk, faults, hosts, image, network, pool, stack, state
from gpuchange.lab.tools import require_machine
from gpuchange.waiting import wait_until

Switch = Literal["on", "off", "cut", "cycle"]
Say = Callable[[str], None]


def _quiet(_: str) -> None:
    return


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
        """power ("on"/"off"), leader (pid of its init, 0 = none), frozen, plugged, boots (counted since lab up)."""
        status: dict[str, Any] = order(self.spec, "status")["hosts"][self.name]
        return status

    @property
    def boots(self) -> int:
        return int(self.status()["boots"])

    def run(self, command: Sequence[str], *, check: bool = True, timeout: float = 120, stdin: str | None = None) -> str:
        """Run a command inside, not over the network; its standard output. Raises LabError if `check` and it fails."""
        leader = self.status()["leader"]
        if not leader:
            raise LabError("the host is off", where=self.name, remedy=f"gpuchange lab mend {self.name} power-cut")
        inside = ["nsenter", "-t", str(leader), "-m", "-u", "-i", "-n", "-p", "--root", "--wd=/", "env", "-i"]
        path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        try:
            done = subprocess.run(
                [*inside, path, "HOME=/root", "LC_ALL=C.UTF-8", *command],
                capture_output=True, text=True, errors="replace", timeout=timeout, input=stdin,
                stdin=subprocess.DEVNULL if stdin is None else None,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise LabError(f"`{' '.join(command)}` did not end within {timeout:g} s", where=self.name) from error
        if check and done.returncode:
            why = (done.stderr.strip() or done.stdout.strip())[-1500:]
            raise LabError(f"`{' '.join(command)}` failed with exit code {done.returncode}", where=self.name, why=why)
        return done.stdout

    def ssh(self, *command: str) -> list[str]:
        """The ssh command line that reaches this host as controllers do."""
        known = f"UserKnownHostsFile={hosts.known_hosts(self.spec)}"
        key = str(hosts.client_key(self.spec))
        options = [
            "-F",
            "none",
            "-i",
            key,
            "-o",
            known,
            "-o",
            "IdentitiesOnly=yes",
            "-o",
            "ConnectTimeout=10",
        ]
        return ["ssh", *options, f"root@{self.address}", *command]

    def power(self, switch: Switch) -> None:
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
        wait_until(self._ssh_answers, timeout=timeout, what=f"{self.name} to answer on port 22", interval=0.1)

    def _ssh_answers(self) -> bool:
        try:
            with socket.create_connection((self.address, 22), timeout=1) as connection:
                connection.settimeout(1)
                return connection.recv(4) == b"SSH-"
        except OSError:
            return False

    def snapshot(self, label: str) -> None:
        """Keep the host's tree under `label` (atomic, like pulling a disk), replacing an older one of that name."""
        target = self._kept(label)
        pool.delete(target)
        pool.snapshot(self.root, target)

    def restore(self, label: str) -> None:
        """Cut the power, put back the tree kept under `label`, power on, wait for ssh. Cable and freezer are reset."""
        if not self._kept(label).exists():
            raise LabError(f"there is no snapshot {label!r}", where=self.name)
        self.power("cut")
        pool.delete(self.root)
        pool.snapshot(self._kept(label), self.root)
        faults.reset(self)
        self.power("on")
        self.wait_ready()

    def _kept(self, label: str) -> Path:
        return self.spec.subvolumes / ".snapshots" / state.check_name(label) / self.name

    def break_(self, fault: str) -> None:
        faults.stage(self, fault)

    def mend(self, fault: str) -> None:
        faults.mend(self, fault)


@dataclass(frozen=True)
class Lab:
    """A running lab."""

    spec: state.LabSpec

    @classmethod
    def up(
        cls,
        name: str = "lab",
        hosts: int = 3,
        gpus: int = 2,
        *,
        say: Say = _quiet,
        install_tools: bool = False,
    ) -> Lab:
        """Build what is missing, start every host, and return when all answer. Safe to call again.

        Raises LabError when the machine cannot carry a lab, or a lab of that name but other size is up.
        """
        state.check_name(name)
        layout = state.plan_hosts(hosts)
        require_machine(install_tools=install_tools)
        with state.locked(f"lab-{name}"):
            spec = _claim(name, layout, gpus)
            lab = cls(spec)
            try:
                lab._build(say)
            except BaseException:
                if not spec.socket.exists():  # it never ran: leave nothing of it
                    lab._remove()
                raise
            lab._start(say)
        return lab

    @classmethod
    def load(cls, name: str = "lab") -> Lab:
        return cls(state.load(name))

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def inventory(self) -> Path:
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
        """{"hosts": {name: see Host.status}, "pid": of the power daemon}; raises LabError when that is not running."""
        return order(self.spec, "status")

    def down(self, *, purge: bool = False) -> None:
        """End every host and remove all that `up` made; with `purge` the cached images too, unless other labs use them."""
        with state.locked(f"lab-{self.name}"):
            self._remove()
        if purge:
            with state.locked("labs"):
                if state.all_labs():
                    raise LabError("other labs are up and use the images", remedy="gpuchange lab status")
                image.purge()

    def _build(self, say: Say) -> None:
        spec = self.spec
        with state.locked("images"):
            say("base system: building it on first use takes a minute or two")
            repository = stack.repository()
            base = image.base_image()
            gpu = image.gpu_image(base, repository)
            say(f"laying out {len(spec.hosts)} hosts")
            hosts.make_keys(spec)
            spec.subvolumes.mkdir(parents=True, exist_ok=True)
            for host in spec.hosts:
                if not spec.tree(host).exists():
                    hosts.lay_out(spec, host, gpu if host.role == "gpu" else base)
        hosts.write_inventory(spec)
        network.create_bridge(spec)
        if not daemon_alive(spec):
            _start_daemon(spec, repository)

    def _start(self, say: Say) -> None:
        say("starting hosts")
        for host in self.hosts:
            host.power("on")
        for host in self.hosts:
            host.wait_ready()

    def _remove(self) -> None:
        spec = self.spec
        if daemon_alive(spec):
            order(spec, "shutdown")
        wait_until(lambda: cgroups.kill(spec.bridge), timeout=20, what="the lab's processes to end")
        for host in self.hosts:
            disk.discard(disk.stand_in(host))
        network.remove_bridge(spec)
        cgroups.remove(spec.bridge)
        with state.locked("labs"):
            if pool.mounted():
                pool.delete_tree(spec.subvolumes)
            shutil.rmtree(spec.directory, ignore_errors=True)
            if not state.all_labs():
                network.restore_limits()
                pool.unmount()


def _claim(name: str, layout: tuple[state.HostSpec, ...], gpus: int) -> state.LabSpec:
    """The lab's description, newly numbered unless it is up already; the shared parts made ready for it."""
    with state.locked("labs"):
        if state.exists(name):
            spec = state.load(name)
            if (spec.hosts, spec.gpus) != (layout, gpus):
                raise LabError(
                    f"lab {name} is up with {len(spec.hosts) - 1} GPU hosts of {spec.gpus} cards",
                    remedy=f"use another --name, or first: gpuchange lab down --name {name}",
                )
        else:
            index = network.free_index({spec.index for spec in state.all_labs()})
            spec = state.LabSpec(name, index, gpus, layout)
            state.save(spec)
        (spec.directory / "logs").mkdir(exist_ok=True)
        pool.mount()
        network.raise_limits()
    return spec


def _start_daemon(spec: state.LabSpec, repository: Path) -> None:
    log = spec.directory / "logs" / "daemon.log"
    package_parent = str(Path(__file__).resolve().parents[2])
    with open(log, "ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "gpuchange.lab.power", spec.name, str(repository)],
            stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd="/", start_new_session=True,
            env={**os.environ, "PYTHONPATH": package_parent, "GPUCHANGE_LAB_DIR": str(state.root())},
        )  # fmt: skip

    def answers() -> bool:
        if process.poll() is not None:
            raise LabError("the power daemon did not start", why=log.read_text()[-800:])
        return daemon_alive(spec)

    wait_until(answers, timeout=20, interval=0.05, what="the lab's power daemon")


def daemon_alive(spec: state.LabSpec) -> bool:
    with contextlib.suppress(LabError):
        order(spec, "status")
        return True
    return False


def order(spec: state.LabSpec, op: str, host: str = "", **more: Any) -> dict[str, Any]:
    """Give the power daemon one order and return its answer. Raises LabError if it refuses or is not there."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(120)
            connection.connect(str(spec.socket))
            connection.sendall(json.dumps({"op": op, "host": host, **more}).encode() + b"\n")
            line = connection.makefile().readline()
    except OSError as error:
        raise LabError(
            f"the power daemon of lab {spec.name} does not answer",
            why=str(error),
            remedy=f"gpuchange lab up --name {spec.name}",
        ) from error
    reply: dict[str, Any] = json.loads(line or '{"ok": false, "error": "the power daemon ended"}')
    if not reply.pop("ok"):
        raise LabError(str(reply["error"]))
    return reply
