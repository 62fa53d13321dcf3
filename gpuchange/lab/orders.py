"""The client's side of the power daemon: starting it, and giving it orders."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpuchange.errors import LabError
from gpuchange.lab import cgroups, state
from gpuchange.waiting import WaitTimeout, wait_until

PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])


def order(spec: state.LabSpec, op: str, host: str = "", **more: Any) -> dict[str, Any]:
    """Give one order and return the daemon's answer. Raises LabError if it refuses or is not there."""
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


def daemon_pid(spec: state.LabSpec) -> int:
    """Process id of the lab's power daemon, 0 when it is not running."""
    with contextlib.suppress(LabError):
        return int(order(spec, "status")["pid"])
    return 0


def start_daemon(spec: state.LabSpec, repository: Path) -> None:
    """Start the daemon, detached from this process, and wait until it takes orders."""
    end_processes(spec)  # hosts that a killed daemon left behind hold their trees
    log = spec.directory / "logs" / "daemon.log"
    environment = {
        "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONPATH": PACKAGE_PARENT,
        "GPUCHANGE_LAB_DIR": str(state.root()),
    }
    with open(log, "wb") as out:
        subprocess.run(
            ["setsid", "--fork", sys.executable, "-m", "gpuchange.lab.power", spec.name, str(repository)],
            stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd="/", env=environment, check=True,
        )  # fmt: skip
    try:
        wait_until(lambda: daemon_pid(spec), timeout=20, interval=0.05, what="the lab's power daemon")
    except WaitTimeout as error:
        raise LabError("the power daemon did not start", why=log.read_text()[-800:]) from error


def stop_daemon(spec: state.LabSpec) -> None:
    """Cut every host's power and wait until the daemon and all it carried are gone."""
    pid = daemon_pid(spec)
    if pid:
        order(spec, "shutdown")
        gone = Path(f"/proc/{pid}")
        wait_until(lambda: not gone.exists(), timeout=20, interval=0.05, what="the power daemon to end")
    end_processes(spec)


def end_processes(spec: state.LabSpec) -> None:
    wait_until(lambda: cgroups.kill(spec.bridge), timeout=20, interval=0.05, what="the lab's processes to end")
