"""What may befall a host or its controller while a play is at work, as something to do at a gate and to undo later."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from changes import ledger
from crashing import POLL, Controller, Gate, alive, kill_alone, kill_tree, processes, seen_acting

from gpuchange.lab import Host
from gpuchange.states import Kind
from gpuchange.waiting import wait_until

WRONG_CLOCK = Path(__file__).with_name("wrongclock.c")
HOUR, DAY = 3600, 86400
STATE_BYTES = 64 << 20
SEEN_WITHIN = 60.0  # seconds within which a controller notices that a host is gone
FROZEN = 25.0


@dataclass(frozen=True)
class Struck:
    """One play that waits at its gate, and everything around it."""

    controller: Controller
    process: subprocess.Popen[bytes]
    gate: Gate
    host: Host

    def at_work(self) -> None:
        """Let the play go, and return when it is at work on the host: for packages, when dpkg is at it."""
        packages = len(ledger(self.host)["packages"])
        seen_acting(self.controller, self.gate, self.host)
        if self.gate.step == "stack/apt":
            wait_until(
                lambda: len(ledger(self.host)["packages"]) > packages or not alive(self.gate.child),
                timeout=SEEN_WITHIN, what="dpkg to be at work", interval=POLL,
            )  # fmt: skip

    def noticed(self) -> bool:
        """The controller has written down what came of the play, or it has ended itself."""
        mine = (event for event in self.controller.events() if event.attempt == self.gate.attempt)
        return self.process.poll() is not None or any(event.kind not in (Kind.STARTED, Kind.PROBING) for event in mine)

    def until_noticed(self, within: float = SEEN_WITHIN) -> None:
        wait_until(lambda: self.noticed() or not alive(self.gate.child), timeout=within, what="the fault to be noticed")


Act = Callable[[Struck], None]


@dataclass(frozen=True)
class Fault:
    """`strike` lets the play go and does the harm; `mend` takes away what still stands when the controller has ended.

    `crash`: the host goes down, so that what dpkg had begun is begun again when it is up.
    """

    strike: Act
    mend: Callable[[Host], None] = lambda _host: None
    crash: bool = False


def _killed(kill: Callable[[Controller, subprocess.Popen[bytes]], None]) -> Act:
    def strike(at: Struck) -> None:
        at.at_work()
        kill(at.controller, at.process)

    return strike


def _cut_off(at: Struck) -> None:
    at.at_work()
    at.host.unplug()
    at.until_noticed()
    at.host.plug()


def _given_up(at: Struck) -> None:
    """The cable stays out until gpuchange has ended."""
    at.at_work()
    at.host.unplug()


def _sshd_killed(at: Struck) -> None:
    """Every sshd of the host, the listening one too, which systemd starts again."""
    at.at_work()
    for pid in [pid for pid, name, _ in processes(at.host.leader) if name.startswith("sshd")]:
        _kill(pid)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _power_cut(at: Struck) -> None:
    at.at_work()
    at.host.power("cut")
    at.host.power("on")


def _frozen(at: Struck) -> None:
    at.at_work()
    at.host.freeze()
    try:
        at.until_noticed(FROZEN)
    finally:
        at.host.thaw()


def _rebooted(at: Struck) -> None:
    at.at_work()
    at.host.run(["systemctl", "reboot"], check=False)


def _host_full(at: Struck) -> None:
    at.host.break_("disk-full")
    at.gate.go()


def _controller_full(at: Struck) -> None:
    """The state directory has not a byte left from before the play on, until gpuchange has ended."""
    ballast = at.controller.state / ".ballast"
    free = os.statvfs(at.controller.state)
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(free.f_bavail * free.f_frsize, 1))
    at.gate.go()
    try:
        wait_until(
            lambda: at.process.poll() is not None, timeout=SEEN_WITHIN, what="gpuchange to end for want of space"
        )
    finally:
        ballast.unlink()


def _clock(seconds: int) -> Act:
    """The controller's clock jumps while the play is at work."""

    def strike(at: Struck) -> None:
        at.at_work()
        clock_of(at.controller).write_text(str(seconds))

    return strike


def clock_of(controller: Controller) -> Path:
    """The file that says by how many seconds the controller's clock is wrong."""
    return controller.directory / "clock"


def set_wrong(controller: Controller) -> None:
    """From now on this controller's wall clock is as wrong as its file says; its monotonic one stays right."""
    clock_of(controller).write_text("0")
    library = str(_build(controller.directory))
    controller.more_environment.update(LD_PRELOAD=library, WRONG_CLOCK=str(clock_of(controller)))


def _build(directory: Path) -> Path:
    library = directory / "wrongclock.so"
    command = ["gcc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(library), str(WRONG_CLOCK)]
    subprocess.run(command, check=True)
    return library


FAULTS: dict[str, Fault] = {
    "controller-killed-alone": Fault(_killed(kill_alone)),
    "controller-killed-with-all": Fault(_killed(kill_tree)),
    "network-cut": Fault(_cut_off),
    "network-cut-until-given-up": Fault(_given_up, mend=Host.plug),
    "sshd-killed": Fault(_sshd_killed),
    "host-power-cut": Fault(_power_cut, crash=True),
    "host-frozen": Fault(_frozen),
    "host-rebooted": Fault(_rebooted, crash=True),
    "host-disk-full": Fault(_host_full, mend=lambda host: host.mend("disk-full")),
    "controller-disk-full": Fault(_controller_full),
    "clock-1h-ahead": Fault(_clock(HOUR)),
    "clock-1h-behind": Fault(_clock(-HOUR)),
    "clock-1d-ahead": Fault(_clock(DAY)),
    "clock-1d-behind": Fault(_clock(-DAY)),
}


@contextmanager
def small_state(controller: Controller) -> Iterator[None]:
    """The controller's state directory is a small file system of its own."""
    controller.state.mkdir(parents=True, exist_ok=True)
    options = f"size={STATE_BYTES},mode=700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "gpuchange-state", str(controller.state)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(controller.state)], check=True)


# -- a host whose clock is wrong --------------------------------------------------------------------------------------


def set_clock(host: Host, seconds: int, scratch: Path) -> None:
    """Everything that sshd and systemd start on the host from now on sees a clock that is off by so much."""
    shutil.copyfile(_build(scratch), host.root / "usr/lib/wrongclock.so")
    (host.root / "etc/wrong-clock").write_text(str(seconds))
    wrong = {"LD_PRELOAD": "/usr/lib/wrongclock.so", "WRONG_CLOCK": "/etc/wrong-clock"}
    (host.root / "etc/environment").write_text("".join(f"{name}={value}\n" for name, value in wrong.items()))
    manager = host.root / "etc/systemd/system.conf.d"
    manager.mkdir(exist_ok=True)
    settings = " ".join(f'"{name}={value}"' for name, value in wrong.items())
    (manager / "clock.conf").write_text(f"[Manager]\nDefaultEnvironment={settings}\n")
    host.run(["systemctl", "daemon-reexec"])


def clock_error(host: Host) -> float:
    """Seconds by which the host's clock is ahead of ours, as a program over ssh sees it."""
    said = subprocess.run(host.ssh("python3 -c 'import time; print(time.time())'"), capture_output=True, text=True)
    return float(said.stdout) - time.time()
