"""Ends controllers at chosen moments, without any hook in the product.

The engine's children take `ansible-playbook` from the directory of the interpreter that runs gpuchange. So an
interpreter of our own (a symlink in a directory laid out like a virtual environment) brings its own `ansible-playbook`,
gate.py, which announces every play and waits. What happens at which play, and when in it, is for the test to say.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from changes import Operator

from gpuchange.lab import Host
from gpuchange.player import carriers, runtime_root
from gpuchange.states import Event, Kind
from gpuchange.waiting import wait_until

GATE = Path(__file__).with_name("gate.py")
PATIENCE = 240.0  # seconds for one step of a controller on a busy machine
POLL = 0.02
PIPE_BYTES = 1 << 20


def make_home(folder: Path) -> Path:
    """A virtual environment made of symlinks, with the gate as its ansible-playbook. Returns its interpreter."""
    scripts = folder / "bin"
    scripts.mkdir(parents=True)
    (folder / "gates").mkdir()
    isolated = "false" if sys.prefix != sys.base_prefix else "true"
    base = Path(os.path.realpath(sys.executable))
    (folder / "pyvenv.cfg").write_text(f"home = {base.parent}\ninclude-system-site-packages = {isolated}\n")
    (folder / "lib").symlink_to(Path(sys.prefix) / "lib")
    (folder / "real").symlink_to(Path(sys.executable).parent)
    (scripts / "python").symlink_to(base)
    for program in Path(sys.executable).parent.glob("ansible*"):
        (scripts / program.name).symlink_to(program)
    gate = scripts / "ansible-playbook"
    gate.unlink(missing_ok=True)
    gate.write_text(f"#!{base} -ISs\n{GATE.read_text()}")
    gate.chmod(0o755)
    return scripts / "python"


@dataclass(frozen=True)
class Gate:
    """A play that waits to be let go. `step`: phase/provider or the role; `child`: the play's parent process."""

    step: str
    tasks: str
    attempt: str
    pid: int
    child: int
    beside: tuple[str, ...]
    folder: Path

    @property
    def fence(self) -> int:
        return int(self.attempt.partition("/")[2].partition(".")[0])

    @property
    def forward(self) -> bool:
        """Not on the way back (release is played by drain's undo)."""
        return self.tasks == "apply" or self.step.startswith("release/")

    def go(self) -> None:
        (self.folder / f"{self.attempt.replace('/', '-')}.go").touch()


Choose = Callable[[Gate], bool]


@dataclass(frozen=True)
class Controller(Operator):
    """An operator's machine: runs gpuchange from an interpreter of its own and can be struck at any play."""

    python: Path = Path()
    seen: set[str] = field(default_factory=set)
    gates: list[Gate] = field(default_factory=list)
    sayings: list[Path] = field(default_factory=list)
    more_environment: dict[str, str] = field(default_factory=dict)

    def begin(self, *args: str) -> subprocess.Popen[bytes]:
        """Start gpuchange; what it says goes to a file of its own (a pipe would be held open by orphans)."""
        self.sayings.append(self.directory / f"said-{len(self.sayings)}.txt")
        with open(self.sayings[-1], "wb") as said:
            return subprocess.Popen(
                [str(self.python), "-m", "gpuchange", *args],
                env={**self.environment, **self.more_environment}, cwd=self.directory, stdin=subprocess.DEVNULL,
                stdout=said, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    @contextlib.contextmanager
    def running(self, *args: str) -> Iterator[subprocess.Popen[bytes]]:
        """The same; when the test gives up inside, nothing of it is left and what it said is told."""
        process = self.begin(*args)
        try:
            yield process
        except BaseException as error:
            kill_tree(self, process)
            raise AssertionError(f"{error}\n--- {' '.join(args)} said:\n{self.said()}") from error

    def said(self) -> str:
        """What the last run said."""
        return self.sayings[-1].read_text(errors="replace")

    @property
    def id(self) -> str:
        return self.change().name

    def next_gate(self, process: subprocess.Popen[bytes]) -> Gate | None:
        """The next play that waits to be let go; None when the run ended."""

        def found() -> Gate | bool:
            ended = process.poll() is not None
            return next((gate for path in self._gate_files() if (gate := self._new_gate(path))), ended)

        gate = wait_until(found, timeout=PATIENCE, what="the next play or the end of gpuchange", interval=POLL)
        return gate if isinstance(gate, Gate) else None

    def _gate_files(self) -> list[Path]:
        return list((self.python.parent.parent / "gates").glob("*.json"))

    def _new_gate(self, path: Path) -> Gate | None:
        if path.name in self.seen:
            return None
        self.seen.add(path.name)
        fact = json.loads(path.read_text())
        self.gates.append(Gate(**{**fact, "beside": tuple(fact["beside"])}, folder=path.parent))
        return self.gates[-1]

    def until(self, process: subprocess.Popen[bytes], choose: Choose) -> Gate | None:
        """Let plays go until `choose` wants one, which then waits; None when the run ended by itself."""
        while (gate := self.next_gate(process)) and not choose(gate):
            gate.go()
        return gate


# -- moments ----------------------------------------------------------------------------------------------------------

Moment = Callable[[Controller, "subprocess.Popen[bytes]", Gate, Host], None]


def before_play(_controller: Controller, _process: subprocess.Popen[bytes], _gate: Gate, _host: Host) -> None:
    """The intent is written; the play has not begun."""


def host_acting(controller: Controller, _process: subprocess.Popen[bytes], gate: Gate, host: Host) -> None:
    """The play's module is at work on the host; for a balancer's part, on the balancer."""
    assert seen_acting(controller, gate, host), f"{gate.step} {gate.tasks} ended before it was seen at work"


def seen_acting(controller: Controller, gate: Gate, host: Host) -> bool:
    """Let the play go and wait until its module is at work; False when the play ended before that was seen."""
    balancer = controller.lab.host("lb1")

    def acting() -> bool:
        if gate.step in ("drain/haproxy", "release/haproxy"):
            return _marked(balancer, gate, host)
        return _module_runs(balancer if gate.step.endswith("haproxy") else host)

    gate.go()

    def reached() -> str:
        return "acting" if acting() else "" if alive(gate.child) else "ended"

    what = f"{gate.step} to be at work on {host.name}"
    return wait_until(reached, timeout=PATIENCE, what=what, interval=0.005) == "acting"


def acted_unrecorded(_controller: Controller, process: subprocess.Popen[bytes], gate: Gate, _host: Host) -> None:
    """The play has come to its end; its controller, stopped meanwhile, has read nothing of it."""
    process.send_signal(signal.SIGSTOP)
    _widen_pipes(process.pid)
    gate.go()
    wait_until(lambda: not alive(gate.child), timeout=PATIENCE, what=f"{gate.step} to come to its end", interval=POLL)


MOMENTS: dict[str, Moment] = {"before": before_play, "acting": host_acting, "unrecorded": acted_unrecorded}


def alive(pid: int) -> bool:
    return _state(pid) not in ("", "Z")


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _widen_pipes(pid: int) -> None:
    """A report larger than a pipe would keep the play from ending while nobody reads."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        if os.readlink(entry).startswith("pipe:") and Path(f"/proc/{pid}/fdinfo/{entry.name}").exists():
            with contextlib.suppress(OSError), open(entry, "rb", buffering=0, opener=_nonblocking) as pipe:
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)


def _nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _marked(balancer: Host, gate: Gate, host: Host) -> bool:
    """The balancer's marker of this server carries the fence of the controller that plays: its module has taken it."""
    marker = balancer.root / f"var/lib/gpuchange/owner-{host.name}.json"
    try:
        found = json.loads(marker.read_text())
    except OSError:
        return False
    return bool(found["change"] == gate.attempt.partition("/")[0] and found["fence"] == gate.fence)


def _module_runs(host: Host) -> bool:
    """A Python below sshd: with pipelining that is a module."""
    return any(comm.startswith("python") for _, comm, above in processes(host.leader) if "sshd" in above)


def processes(pid: int, above: tuple[str, ...] = ()) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    """(pid, command name, names of its ancestors) of every process below `pid`."""
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                comm = Path(f"/proc/{child}/comm").read_text().strip()
                yield int(child), comm, above
                yield from processes(int(child), (*above, comm.partition("-")[0]))


# -- strikes ----------------------------------------------------------------------------------------------------------

Strike = Callable[[Controller, "subprocess.Popen[bytes]"], None]


def kill_alone(_controller: Controller, process: subprocess.Popen[bytes]) -> None:
    """kill -9 of the engine's process only; its plays live on."""
    process.kill()
    process.wait()


def kill_tree(controller: Controller, process: subprocess.Popen[bytes]) -> None:
    """kill -9 of the engine and everything it started, as the end of its machine would."""
    process.send_signal(signal.SIGSTOP)  # so that it starts nothing while its processes are counted
    _kill(descendants(process.pid))
    process.kill()
    process.wait()
    wait_until(lambda: not _kill(_plays(controller)), timeout=30, what="the tree to end", interval=POLL)


def _kill(pids: list[int]) -> list[int]:
    """kill -9; those that were alive. A play may fork while it is being killed: ask again until there are none."""
    there = [pid for pid in pids if alive(pid)]
    for pid in there:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return there


def _plays(controller: Controller) -> list[int]:
    return [pid for path in controller.state.glob("[!.]*") for pid in carriers(path.name)]


def descendants(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


STRIKES: dict[str, Strike] = {"engine": kill_alone, "tree": kill_tree}


# -- campaigns --------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What a change went through: `kills` by "step tasks", plays that outlived them, the exit code at last."""

    kills: Counter[str] = field(default_factory=Counter)
    orphans: int = 0
    code: int = -1
    seconds: float = 0.0


Blow = Callable[[Controller, "subprocess.Popen[bytes]", Gate, Host], int]


def blow(moment: str, strike: str) -> Blow:
    """Wait for the moment, then strike. Returns 1 when the play outlived its controller, else 0."""

    def fall(controller: Controller, process: subprocess.Popen[bytes], gate: Gate, host: Host) -> int:
        MOMENTS[moment](controller, process, gate, host)
        STRIKES[strike](controller, process)
        return int(alive(gate.child))

    return fall


def campaign(controller: Controller, host: Host, choose: Choose, fall: Blow) -> Tally:
    """Apply the plan; let the blow fall at every play that `choose` wants, and resume, until a run ends by itself."""
    tally, began = Tally(), time.monotonic()
    command = ["apply", str(controller.directory / "plan.yaml"), "--yes"]
    while True:
        with controller.running(*command) as process:
            gate = controller.until(process, choose)
            if gate is None:
                tally.code, tally.seconds = process.wait(), time.monotonic() - began
                return tally
            tally.orphans += fall(controller, process, gate, host)
        tally.kills[f"{gate.step} {gate.tasks}"] += 1
        command = ["resume", controller.id, "--yes"]


def once(each: int = 1, *, only: Callable[[Gate], bool] = lambda gate: gate.tasks != "probe") -> Choose:
    """Wants every play that acts (or `only` those), each step and direction `each` times."""
    struck: Counter[tuple[str, str]] = Counter()

    def choose(gate: Gate) -> bool:
        if not only(gate) or struck[gate.step, gate.tasks] >= each:
            return False
        struck[gate.step, gate.tasks] += 1
        return True

    return choose


# -- what must be true at the end -------------------------------------------------------------------------------------


def left_behind(controller: Controller, host: Host) -> list[str]:
    """What is still there of an ended change and must not be: processes, directories, units, markers."""
    change = controller.id
    found = [f"process {pid} of {change}" for pid in carriers(change) if alive(pid)]
    found += [str(path) for path in runtime_root().glob(f"{change}*")]
    for machine in (host, controller.lab.host("lb1")):
        listed = machine.run(["systemctl", "list-units", "--all", "--plain", "--no-legend", f"gpuchange-{change}-*"])
        found += [f"{machine.name}: {line}" for line in listed.splitlines()]
        found += [f"{machine.name}: {marker}" for marker in _markers(machine, change)]
        found += [f"{machine.name}: {path}" for path in machine.root.glob(f"var/lib/gpuchange/{change}/.*.new")]
    return found


def _markers(host: Host, change: str) -> list[str]:
    return [path.name for path in host.root.glob("var/lib/gpuchange/owner*.json") if change in path.read_text()]


def begun(host: Host, change: str) -> list[str]:
    """The names of the long works that began on the host; each can begin once only."""
    return sorted(path.name for path in (host.root / "var/lib/gpuchange" / change).glob("*.begun"))


def failed_results(host: Host, change: str) -> dict[str, Any]:
    """Results of long works on the host that did not end with 0."""
    found = {}
    for path in (host.root / "var/lib/gpuchange" / change).glob("*.begun"):
        result = path.with_suffix(".json")
        said = json.loads(result.read_text()) if result.exists() else {"rc": "no result"}
        if said["rc"] != 0 and "reboot" not in path.name:
            found[path.name] = said
    return found


def takeovers(events: list[Event]) -> int:
    return sum(1 for event in events if event.kind is Kind.CONTROLLER)
