"""The power daemon: one long-lived process a lab, parent of all its hosts, as mains and cables are to a rack.

It starts each host with systemd-nspawn, starts it again when the guest reboots, and takes orders over a unix
socket, one JSON object a line: {"op": "off", "host": "gpu1"} -> {"ok": true, ...} or {"ok": false, "error": "..."}.
Run as `python -m gpuchange.lab.power LAB`; `gpuchange lab up` does that.
"""

from __future__ import annotations

import json
import os
import signal
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from gpuchange.errors import GpuchangeError, LabError
from gpuchange.lab import cgroups, network, stack, state

REBOOT_ASKED = 133  # with --keep-unit, systemd-nspawn ends with this code instead of rebooting by itself
BUTTON_PATIENCE = 60.0  # seconds a host may take to shut down after the power button
# a process joins its host's control groups before it becomes nspawn, so that none ever runs outside them
JOIN_GROUPS = 'while [ "$1" != -- ]; do echo $$ > "$1/cgroup.procs"; shift; done; shift; exec "$@"'


class Supply:
    """The power supply of one host. All public methods are safe to call from any thread."""

    def __init__(self, spec: state.LabSpec, host: state.HostSpec) -> None:
        self.spec, self.host = spec, host
        self.boots = 0
        self.plugged = True
        self._cable = threading.Lock()
        self.frozen = False
        self.binds: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._wanted = False
        self._lock = threading.RLock()

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def leader(self) -> int:
        """Process id of the guest's init as seen from outside, 0 when there is none."""
        process = self._process
        if process is None or process.poll() is not None:
            return 0
        try:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        except OSError:
            return 0
        return int(children[0]) if children else 0

    def on(self) -> None:
        with self._lock:
            if not self.running:
                self._wanted = True
                self._thread = threading.Thread(target=self._keep_on, name=self.host.name, daemon=True)
                self._thread.start()

    def off(self) -> None:
        """Press the power button and wait; after a minute without effect, cut."""
        with self._lock:
            self.thaw()
            if self.running and self._process:
                self._process.send_signal(signal.SIGTERM)
                self._end(BUTTON_PATIENCE)
            if self.running:
                self.cut()

    def cut(self) -> None:
        """Take the power away: every process of the guest is gone at once, nothing is written out."""
        with self._lock:
            self._wanted = False
            deadline = time.monotonic() + 20
            while self.running and time.monotonic() < deadline:
                self._kill_leader()
                self.thaw()
                self._end(0.2)
            if self.running:
                raise LabError("the host does not end", where=self.host.name)
            self._log("cut")

    def cycle(self) -> None:
        with self._lock:
            self.cut()
            self.on()

    def freeze(self) -> None:
        with self._lock:
            if not self.running:
                raise LabError("only a running host can be frozen", where=self.host.name)
            cgroups.freeze(self.spec.bridge, self.host.name, True)
            self.frozen = True

    def thaw(self) -> None:
        if self.frozen:
            cgroups.freeze(self.spec.bridge, self.host.name, False)
            self.frozen = False

    def plug(self, plugged: bool) -> None:
        """Pull or insert the network cable; it stays that way over reboots."""
        cable = network.cable(self.spec, self.host)
        with self._cable:
            self.plugged = plugged
            if cable in network.links():
                network.plug(cable, plugged)

    def status(self) -> dict[str, Any]:
        return {
            "power": "on" if self.running else "off",
            "leader": self.leader,
            "frozen": self.frozen,
            "plugged": self.plugged,
            "boots": self.boots,
        }

    def _end(self, patience: float) -> None:
        if self._thread:
            self._thread.join(patience)

    def _kill_leader(self) -> None:
        leader = self.leader
        if leader:
            os.kill(leader, signal.SIGKILL)

    def _keep_on(self) -> None:
        code = REBOOT_ASKED
        while code == REBOOT_ASKED and self._wanted:
            code = self._boot()
        self._log("off", code=code)

    def _boot(self) -> int:
        """One run of the guest from power to its end. Returns nspawn's exit code."""
        self._clear_cable()
        self.boots += 1
        self._log("boot", number=self.boots)
        with open(self.spec.directory / "logs" / f"{self.host.name}.console", "ab") as console:
            self._process = subprocess.Popen(
                self._command(), stdin=subprocess.DEVNULL, stdout=console, stderr=console, cwd="/"
            )
            if not self.plugged:
                self._pull_when_there()
            return self._process.wait()

    def _command(self) -> list[str]:
        tree = self.spec.tree(self.host)
        nodes = [f"--bind=/dev/null:{node}" for node in stack.device_nodes(tree)]
        groups = [str(group) for group in cgroups.create(self.spec.bridge, self.host.name)]
        # setpriv: should this daemon be killed, its hosts shut down instead of living on without a parent
        return [
            "sh", "-c", JOIN_GROUPS, "lab-host", *groups, "--", "setpriv", "--pdeathsig", "TERM",
            "systemd-nspawn", "-q", "-D", str(tree), "-b", f"--machine={self.spec.machine(self.host)}",
            f"--hostname={self.host.name}", f"--network-bridge={self.spec.bridge}", "--register=no", "--keep-unit",
            "--console=pipe", "--resolv-conf=off", "--timezone=off", "--settings=no", "--link-journal=no",
            *nodes, *(f"--bind={bind}" for bind in self.binds),
        ]  # fmt: skip

    def _clear_cable(self) -> None:
        """A killed guest's cable lingers a moment, and nspawn refuses to start while it does."""
        cable = network.cable(self.spec, self.host)
        for _ in range(50):
            if cable not in network.links():
                return
            network.remove_link(cable)
            time.sleep(0.05)

    def _pull_when_there(self) -> None:
        cable = network.cable(self.spec, self.host)
        while self._process and self._process.poll() is None:
            if cable in network.links():
                # nspawn itself brings the cable up a moment after making it
                for _ in range(20):
                    with self._cable:  # meanwhile it may have been plugged in again
                        if self.plugged:
                            return
                        network.plug(cable, False)
                    time.sleep(0.05)
                return
            time.sleep(0.01)

    def _log(self, event: str, **fields: Any) -> None:
        line = json.dumps({"time": time.time(), "host": self.host.name, "event": event, **fields})
        with open(self.spec.directory / "logs" / "power.jsonl", "a") as log:
            log.write(line + "\n")


class Rack:
    """All power supplies of one lab, and the package server on its bridge."""

    def __init__(self, spec: state.LabSpec) -> None:
        self.spec = spec
        self.supplies = {host.name: Supply(spec, host) for host in spec.hosts}
        self.ended = threading.Event()

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out one order. Raises LabError for an order that makes no sense."""
        op = str(request.get("op"))
        if op == "status":
            return {
                "hosts": {name: supply.status() for name, supply in self.supplies.items()},
                "pid": os.getpid(),
            }
        if op == "shutdown":
            self.shutdown()
            return {}
        supply = self.supplies.get(str(request.get("host")))
        if supply is None:
            raise LabError(f"no host {request.get('host')!r} in lab {self.spec.name}")
        orders: dict[str, Callable[[], None]] = {
            "on": supply.on,
            "off": supply.off,
            "cut": supply.cut,
            "cycle": supply.cycle,
            "freeze": supply.freeze,
            "thaw": supply.thaw,
            "plug": lambda: supply.plug(True),
            "unplug": lambda: supply.plug(False),
            "set-binds": lambda: setattr(supply, "binds", list(request.get("binds", ()))),
        }
        if op not in orders:
            raise LabError(f"unknown order {op!r}", remedy=f"known: {', '.join(sorted(orders))}")
        orders[op]()
        return supply.status()

    def shutdown(self) -> None:
        cutters = [threading.Thread(target=supply.cut) for supply in self.supplies.values()]
        for cutter in cutters:
            cutter.start()
        for cutter in cutters:
            cutter.join()
        self.ended.set()

    def serve_packages(self, directory: Path) -> None:
        def handler(*args: Any) -> SimpleHTTPRequestHandler:
            return QuietFiles(*args, directory=str(directory))

        server = ThreadingHTTPServer((self.spec.gateway, state.APT_PORT), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()


class QuietFiles(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """The daemon's log is for power."""


def _socket_handler(rack: Rack) -> type[socketserver.StreamRequestHandler]:
    class Orders(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            for line in self.rfile:
                try:
                    reply = {"ok": True, **rack.handle(json.loads(line))}
                except (GpuchangeError, OSError, ValueError) as error:
                    reply = {"ok": False, "error": str(error)}
                self.wfile.write(json.dumps(reply).encode() + b"\n")

    return Orders


class OrderServer(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 128  # a full queue refuses at once: every host of a lab may be ordered about at one moment


def main(name: str, repository: str) -> None:
    spec = state.load(name)
    rack = Rack(spec)
    spec.socket.unlink(missing_ok=True)
    rack.serve_packages(Path(repository))
    os.umask(0o077)
    server = OrderServer(str(spec.socket), _socket_handler(rack))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: threading.Thread(target=rack.shutdown).start())
    rack.ended.wait()
    server.shutdown()
    spec.socket.unlink(missing_ok=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
