"""Kills gpuchange at one system call, puts it right as an operator would, and tells what the hosts say.

    python crash_server.py HOME REAL_PACKAGES   jobs as JSON lines on standard input, answers on standard output

It has the product loaded and forks a process for each command line, so that a point costs a fraction of a second.
That process waits until strace has it, then runs the command line of gpuchange; its plays are not followed.
"""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ansible_runner

import gpuchange.providers
from gpuchange import change as changes
from gpuchange import cli, content, engine, inventory, journal, looking, orders, ssh  # noqa: F401  # loaded once for all
from gpuchange import player as players
from gpuchange.change import Change, Connection
from gpuchange.cli import apply, going, live, report, running, verbs  # noqa: F401
from gpuchange.player import carriers, runtime_root
from reliability.crash_fork import Forked
from reliability.crash_plans import ALL, RUN, Script, registry

CALLS = (
    *("write", "pwrite64", "writev", "pwritev", "pwritev2", "sendto", "sendmsg", "sendfile", "copy_file_range"),
    *("fsync", "fdatasync", "sync_file_range", "ftruncate", "truncate", "fallocate"),
    *("open", "openat", "creat", "mknod", "mknodat", "mkdir", "mkdirat", "rmdir", "unlink", "unlinkat"),
    *("rename", "renameat", "renameat2", "link", "linkat", "symlink", "symlinkat"),
    *("chmod", "fchmod", "fchmodat", "chown", "fchown", "fchownat", "utimensat"),
)
"""System calls that change something outside of the process; of the opening ones those that create."""
LINE = re.compile(r"^(\w+)\((.*)")
PATIENCE = 60.0


@dataclass(frozen=True)
class Point:
    """Before the `nth` system call `call` of a command."""

    call: str
    nth: int


class Stuck(Exception):
    pass


def within(seconds: float, what: str) -> Iterator[None]:
    """Ticks until the caller is content. Raises Stuck."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        yield
        time.sleep(0.002)
    raise Stuck(f"waited {seconds:g} s in vain for {what}")


class Place:
    """One change and its hosts: `root`/state/CHANGE, `root`/world."""

    def __init__(self, root: Path, change: str) -> None:
        self.root, self.change = root, change
        self.world, self.home = root / "world", root / "state" / change

    @classmethod
    def fresh(cls, root: Path, template: Path, script: Script) -> Place:
        """A copy of the change `template`, just created, and hosts that know nothing of it."""
        place = cls(root, template.name)
        shutil.rmtree(root, ignore_errors=True)
        place.home.mkdir(parents=True, mode=0o700)
        shutil.copyfile(template / "journal.db", place.home / "journal.db")
        (place.home / "frozen").symlink_to(template / "frozen")
        for number in range(1, script.hosts + 1):
            (place.world / "hosts" / f"h{number}").mkdir(parents=True)
            (place.world / "hosts" / f"h{number}" / "ledger").touch()
        (place.world / "script.json").write_text(json.dumps(script.faults))
        return place

    @classmethod
    def copied(cls, root: Path, kept: Path, change: str) -> Place:
        """As it stood between two stages."""
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(kept, root, symlinks=True)
        return cls(root, change)

    def ledger(self) -> list[list[str]]:
        """[host, role, what] of every act, in the order of time."""
        lines = []
        for folder in sorted((self.world / "hosts").iterdir()):
            for line in (folder / "ledger").read_text().splitlines():
                at, role, what = line.split()
                lines.append((int(at), folder.name, role, what))
        return [list(line[1:]) for line in sorted(lines) if line[3] != "look"]

    def statuses(self) -> dict[str, str]:
        change = Change.open(self.home, readonly=True)
        try:
            change.journal.verify()
            hosts = change.state.hosts.items()
            return {f"{host} {'/'.join(key)}": str(s.status) for host, h in hosts for key, s in h.steps.items()}
        finally:
            change.journal.close()

    def left_behind(self) -> list[str]:
        found = [f"process {pid}" for pid in carriers(self.change)]
        return found + [str(path) for path in runtime_root().glob(f"{self.change}*")]

    def markers(self) -> list[str]:
        return sorted(path.parent.name for path in self.world.glob("hosts/*/owner.json"))


def child(place: Place, command: tuple[str, ...], go: int) -> None:
    """In the forked process: the command line of gpuchange, and nothing else."""
    os.environ.update(HOME=str(place.world), GPUCHANGE_STATE=str(place.home.parent))
    code = 70
    try:
        os.dup2(os.open(place.root / "said.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 1)
        os.dup2(1, 2)
        os.read(go, 1)
        words = [word.format(change=place.change) for word in command]
        code = cli.main([*words, *(["--yes", "--json"] if command[0] != "resolve" else [])])
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


@contextmanager
def forked(place: Place, command: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    """(process, pipe that lets it go) of a command that has not begun."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write)
        child(place, command, read)
    os.close(read)
    try:
        yield pid, write
    finally:
        os.close(write)


def run(place: Place, command: tuple[str, ...], strace: tuple[str, ...] = ()) -> int:
    """Run one command line to its end, under strace if options are given. Returns its code, -9 when it was killed."""
    with forked(place, command) as (pid, go):
        tracer = attach(pid, strace, place.root / "trace") if strace else None
        os.write(go, b".")
        status = ended(pid)
        if tracer:
            tracer.wait(PATIENCE)
    return os.waitstatus_to_exitcode(status)


def ended(pid: int) -> int:
    """Its wait status. Raises Stuck, and ends it, when it does not end."""

    def give_up(*_: object) -> None:
        os.kill(pid, signal.SIGKILL)
        raise Stuck(f"gpuchange did not end within {PATIENCE:g} s")

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(int(PATIENCE))
    try:
        return os.waitpid(pid, 0)[1]
    finally:
        signal.alarm(0)


def attach(pid: int, options: tuple[str, ...], output: Path) -> subprocess.Popen[bytes]:
    tracer = subprocess.Popen(["strace", "-qq", "-o", str(output), *options, "-p", str(pid)], stdin=subprocess.DEVNULL)
    for _ in within(PATIENCE, "strace to take hold"):
        if not re.search(r"TracerPid:\t0\n", Path(f"/proc/{pid}/status").read_text()):
            return tracer
        if tracer.poll() is not None:
            raise Stuck("strace ended at once")
    raise AssertionError


def points(trace: Path) -> list[Point]:
    """Every write-class call of a traced command."""
    seen: dict[str, int] = {}
    found = []
    for line in trace.read_text(errors="replace").splitlines():
        match = LINE.match(line)
        if match:
            call, arguments = match.groups()
            seen[call] = seen.get(call, 0) + 1
            if call not in ("open", "openat") or "O_CREAT" in arguments:
                found.append(Point(call, seen[call]))
    return found


def blow(point: Point) -> tuple[str, ...]:
    return ("-e", f"trace={point.call}", "-e", f"inject={point.call}:signal=SIGKILL:when={point.nth}")


LOOK = ("-e", f"trace=?{',?'.join(CALLS)}")


class Server:
    def __init__(self, folder: Path) -> None:
        self.folder, self.templates = folder, dict[str, Path]()

    def template(self, name: str) -> Path:
        script = ALL[name]
        gpuchange.providers.PROVIDERS = registry(script.phases)
        if name not in self.templates:
            root = self.folder / f"template-{len(self.templates)}"
            root.mkdir()
            (root / "plan.yaml").write_text(script.plan())
            sources = (str(self._inventory(script.hosts)),)
            self.templates[name] = changes.create(root / "state", root / "plan.yaml", Connection(sources))
            changes.load(self.templates[name] / "frozen" / "plan.yaml")
        return self.templates[name]

    def _inventory(self, hosts: int) -> Path:
        path = self.folder / f"inventory-{hosts}.yaml"
        lines = "".join(f"    h{n}: {{ansible_connection: local}}\n" for n in range(1, hosts + 1))
        path.write_text(f"all:\n  hosts:\n{lines}")
        return path

    def place(self, name: str, stage: int = 0) -> Place:
        """The change before its stage number `stage`."""
        root, template = self.folder / "place", self.template(name)
        if stage:
            return Place.copied(root, self._between(name, stage), template.name)
        return Place.fresh(root, template, ALL[name])

    def _between(self, name: str, stage: int) -> Path:
        kept = self.folder / "between" / f"{name}-{stage}"
        if not kept.exists():
            place = self.place(name, stage - 1)
            run(place, ALL[name].stages[stage - 1])
            shutil.copytree(place.root, kept, symlinks=True)
        return kept

    def calm(self, job: dict[str, Any]) -> dict[str, Any]:
        """The undisturbed change: what it comes to, and the points of each of its stages."""
        place, script, found = self.place(job["script"]), ALL[job["script"]], []
        for stage in script.stages:
            code = run(place, stage, LOOK)
            found.append([[point.call, point.nth] for point in points(place.root / "trace")])
        return {**self.outcome(place, code), "points": found}

    def strike(self, job: dict[str, Any]) -> dict[str, Any]:
        """Kill the stage at the point, and its remedy too if `then` is given; then go on to the end."""
        script = ALL[job["script"]]
        place, stage = self.place(job["script"], job["stage"]), script.stages[job["stage"]]
        hits, code = 0, run(place, stage, blow(Point(*job["at"])))
        for later in ([job["then"]] if job["then"] else []) + [None]:
            if code != -signal.SIGKILL:
                break
            hits += 1
            if job["patient"]:
                self.let_plays_end(place)
            code = run(place, remedy(script, stage), blow(Point(*later)) if later else ())
        for stage in script.stages[job["stage"] + 1 :]:
            code = run(place, stage)
        return {**self.outcome(place, code), "hits": hits}

    @staticmethod
    def let_plays_end(place: Place) -> None:
        for _ in within(PATIENCE, "the orphaned play to end"):
            if not carriers(place.change):
                return

    @staticmethod
    def outcome(place: Place, code: int) -> dict[str, Any]:
        found = {"code": code, "ledger": place.ledger(), "statuses": place.statuses(), "markers": place.markers()}
        said = (place.root / "said.txt").read_text(errors="replace")
        return {**found, "left": place.left_behind(), "said": said[-3000:], "traceback": "Traceback" in said}


def remedy(script: Script, stage: tuple[str, ...]) -> tuple[str, ...]:
    return script.remedy if stage == RUN else stage


def once_read(read: Any, key: Any) -> Any:
    """What only reads, and takes long: inventories and plans are read once by the server, before it forks."""
    known: dict[Any, Any] = {}

    def ask(*given: Any, **flags: Any) -> Any:
        named = key(given[0])
        if named not in known:
            known[named] = read(*given, **flags)
        return known[named]

    return ask


def lighten(server: Server) -> None:
    """Leave out what a point would only wait for. Nothing here writes, in this process or in the product."""
    inventory.resolve = once_read(inventory.resolve, lambda sources: sources[0])
    changes.load = once_read(changes.load, lambda path: Path(path).resolve())
    light = server.folder / "playbooks"
    light.mkdir()
    shutil.copy(content.playbooks() / content.PLAYBOOK, light)
    content.playbooks = lambda: light


def main() -> None:
    os.environ.pop("GPUCHANGE_ATTEMPT")
    if "standin" in str(ansible_runner.__file__):
        players.subprocess = SimpleNamespace(Popen=Forked, PIPE=subprocess.PIPE)
    server = Server(Path(sys.argv[1]))
    lighten(server)
    gc.disable()  # a collection in a fork would copy the memory that it shares with the server
    gc.freeze()
    for line in sys.stdin:
        job = json.loads(line)
        try:
            answer = server.calm(job) if job["what"] == "calm" else server.strike(job)
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
