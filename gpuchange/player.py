"""Plays: one child process per ansible-runner invocation, evidence over a pipe, nothing left behind.

The parent never imports ansible_runner. Every process of a play carries `GPUCHANGE_ATTEMPT=<change>/<attempt>` in its
environment, so that a later controller can end what a dead one left running (`end_orphans`).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuchange.errors import NeedsOperator
from gpuchange.playchild import unsafe
from gpuchange.reports import Evidence, Failed, Reported, Silent, Unreachable
from gpuchange.waiting import WaitTimeout, wait_until

ATTEMPT = "GPUCHANGE_ATTEMPT"
ALLOWED = (
    *("HOME", "LOGNAME", "USER", "PATH", "SHELL", "VIRTUAL_ENV", "PYTHONPATH", "XDG_RUNTIME_DIR"),
    *("SSH_AUTH_SOCK", "KRB5CCNAME", "ANSIBLE_CONFIG", "ANSIBLE_COLLECTIONS_PATH"),
    *("ANSIBLE_VAULT_PASSWORD_FILE", "ANSIBLE_VAULT_IDENTITY_LIST"),
)
SETTINGS = {
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
    "ANSIBLE_HOST_KEY_CHECKING": "True",  # ansible-runner switches it off unless it is set
    "ANSIBLE_PIPELINING": "True",
    "ANSIBLE_TIMEOUT": "10",
    "ANSIBLE_SSH_CONTROL_PATH": "",  # a hashed name, whatever ansible.cfg says: the path has a limit
    "ANSIBLE_SSH_RETRIES": "0",  # a retry would run a module twice
    "ANSIBLE_SSH_ARGS": "-o ControlMaster=auto -o ControlPersist=120s -o BatchMode=yes "
    "-o ServerAliveInterval=3 -o ServerAliveCountMax=3",
    "ANSIBLE_CACHE_PLUGIN": "memory",  # facts of yesterday must not be believed
    "ANSIBLE_GATHERING": "explicit",
    "ANSIBLE_INVENTORY_ENABLED": "auto,host_list,script,yaml,ini,toml",
    "ANSIBLE_DEPRECATION_WARNINGS": "False",
    "ANSIBLE_NOCOLOR": "1",
    "ANSIBLE_STRATEGY": "free",
    "ANSIBLE_ANY_ERRORS_FATAL": "False",
    "ANSIBLE_DISPLAY_TRACEBACK": "never",
}
LOG_LIMIT = 256 * 1024
REDACTED = "********"


@dataclass(frozen=True)
class Request:
    """One play. `hosts` names, `inventory` -i arguments, `host_args` host → the role's arguments (plain JSON data).

    Everything in `shared` and `host_args` is data: it is passed as unsafe text and never templated.
    """

    attempt: str
    playbook: Path
    role: str
    tasks: str
    hosts: tuple[str, ...]
    inventory: tuple[str, ...]
    host_args: Mapping[str, Mapping[str, Any]]
    shared: Mapping[str, Any]
    cmdline: str = ""
    become_password: str | None = field(default=None, repr=False)
    forks: int = 50
    verbosity: int = 0

    def extravars(self) -> dict[str, Any]:
        data = {
            "gpuchange_role": self.role,
            "gpuchange_tasks": self.tasks,
            "gpuchange_host_args": self.host_args,
            **self.shared,
        }
        return dict(unsafe(data))


def runtime_root() -> Path:
    """A short private directory on a tmpfs where there is one (control sockets have a path limit of 107 bytes)."""
    base = next(p for p in (Path("/run"), Path("/dev/shm"), Path("/tmp")) if os.access(p, os.W_OK))
    root = base / f"gpuchange-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    if root.is_symlink() or root.stat().st_uid != os.getuid() or root.stat().st_mode & 0o077:
        raise NeedsOperator(f"{root} is not a private directory of ours", remedy=f"remove it: rm -r {root}")
    return root


def ansible_config() -> dict[str, str]:
    """The ansible.cfg that Ansible would find from here: a play runs in another directory. SETTINGS outrank it."""
    here = Path.cwd() / "ansible.cfg"
    trusted = here.is_file() and not Path.cwd().stat().st_mode & 0o002  # Ansible ignores a world-writable place too
    return {"ANSIBLE_CONFIG": str(here)} if trusted and "ANSIBLE_CONFIG" not in os.environ else {}


def connections(change: str) -> Path:
    """Where the sockets of the change's kept ssh connections lie: its own, so that they end with it."""
    return runtime_root() / f"{change}-cp"


def environment(attempt: str) -> dict[str, str]:
    """The allow-listed environment of a play: the controller's other variables stay out of every file and host."""
    kept = {name: os.environ[name] for name in ALLOWED if name in os.environ}
    here = str(Path(__file__).resolve().parent.parent)
    scripts = str(Path(sys.executable).parent)  # the ansible-playbook that was installed with us, not another one
    path = ":".join(dict.fromkeys([scripts, *kept.get("PATH", "/usr/bin:/bin").split(":")]))
    python_path = ":".join(filter(None, [here, kept.get("PYTHONPATH", "")]))
    return {
        **kept,
        **ansible_config(),
        **SETTINGS,
        "PATH": path,
        "PYTHONPATH": python_path,
        "ANSIBLE_SSH_CONTROL_PATH_DIR": str(connections(attempt.partition("/")[0])),
        ATTEMPT: attempt,
    }


class Play:
    """A play in flight. Read `evidence()` when `fileno()` is readable; `ended` after the last line."""

    def __init__(self, request: Request, log_dir: Path) -> None:
        self.request = request
        self.ended = self.stopped = False
        self.end: dict[str, Any] = {}
        self.reported: set[str] = set()
        self._rest = b""
        self.private = runtime_root() / request.attempt.replace("/", "-")
        self.private.mkdir(mode=0o700)
        self.log = log_dir / f"{request.attempt.split('/')[-1]}.log"
        log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(self.log, "wb", opener=lambda p, f: os.open(p, f, 0o600)) as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gpuchange.playchild"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment(request.attempt),
                cwd=self.private,
                start_new_session=True,  # Ctrl-C on the terminal reaches the engine only
            )
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(self._message()).encode())
        self.process.stdin.close()
        os.set_blocking(self.process.stdout.fileno(), False)

    def _message(self) -> dict[str, Any]:
        request = self.request
        return {
            "private_dir": str(self.private),
            "ident": "play",
            "playbook": str(request.playbook),
            "hosts": list(request.hosts),
            "inventory": list(request.inventory),
            "extravars": request.extravars(),
            "cmdline": request.cmdline,
            "forks": request.forks,
            "verbosity": request.verbosity,
            "become_password": request.become_password,
        }

    def fileno(self) -> int:
        assert self.process.stdout
        return self.process.stdout.fileno()

    def evidence(self) -> Iterator[Evidence]:
        """What has arrived. When the play has ended, hosts that said nothing are Silent."""
        for line in self._lines():
            fact = redacted(json.loads(line), self.request.become_password)
            if "end" in fact:
                self.end = fact["end"]
            elif fact["evidence"]["host"] not in self.reported:
                self.reported.add(fact["evidence"]["host"])
                yield read_evidence(fact["evidence"])
        if self.ended:
            self._close()
            for host in self.request.hosts:
                if host not in self.reported:
                    yield Silent(host, self._why_silent(), self.stopped)

    def _lines(self) -> Iterator[bytes]:
        try:
            while chunk := os.read(self.fileno(), 1 << 16):
                self._rest += chunk
            self.ended = True
        except BlockingIOError:
            pass
        *lines, self._rest = self._rest.split(b"\n")
        return iter([line for line in lines if line])

    def _why_silent(self) -> str:
        if self.stopped:
            return "the operator ended the play: state unknown"
        if not self.end:
            return f"the play's process ended (exit {self.process.returncode}) without a result: state unknown"
        if not self.end.get("stats"):
            return "no final statistics from ansible: result unknown"
        return f"ansible ended ({self.end.get('status')}) without a report from this host: state unknown"

    def _close(self) -> None:
        assert self.process.stdout
        self.process.wait()
        self.process.stdout.close()
        shutil.rmtree(self.private, ignore_errors=True)
        clean = self.end.get("rc") == 0 and set(self.request.hosts) <= self.reported
        if clean:
            self.log.unlink(missing_ok=True)
        else:
            bound_log(self.log, self.request.become_password)

    def stop(self) -> None:
        """Ask the play to end; its hosts become Silent and are probed later."""
        self.stopped = True
        end_orphans(self.request.attempt)


def redacted(said: Any, secret: str | None) -> Any:
    """JSON data without the secret that we know by value, wherever a host repeats it."""
    if not secret:
        return said
    if isinstance(said, str):
        return said.replace(secret, REDACTED)
    if isinstance(said, Mapping):
        return {redacted(key, secret): redacted(item, secret) for key, item in said.items()}
    return [redacted(item, secret) for item in said] if isinstance(said, list) else said


def read_evidence(fact: Mapping[str, Any]) -> Evidence:
    host, where = str(fact["host"]), str(fact.get("where") or "")
    if fact["kind"] == "reported":
        return Reported(host, dict(fact["report"]), where)
    if fact["kind"] == "failed":
        return Failed(host, str(fact["why"]), where, fact.get("refused"))
    if fact["kind"] == "silent":
        return Silent(host, str(fact["why"]))
    return Unreachable(host, str(fact["why"]), where)


def bound_log(path: Path, secret: str | None) -> None:
    """Keep the tail of a failed play's output, without the secret that we know by value."""
    text = path.read_bytes()[-LOG_LIMIT:].decode(errors="replace")
    path.write_text(text.replace(secret, REDACTED) if secret else text)


def _carries(pid: str, mark: bytes, title: bytes) -> bool:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if any(variable == mark or variable.startswith(mark + b"/") for variable in variables):
            return True
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(title)
    except OSError:  # ended meanwhile, or not ours
        return False


def carriers(attempt: str) -> list[int]:
    """Processes on this machine that carry `attempt` (a change id, or change/attempt) in their environment.

    A change also has its kept ssh connections, which write their title (`ssh: SOCKET [mux]`) over their environment.
    """
    mark, title = f"{ATTEMPT}={attempt}".encode(), f"ssh: {connections(attempt)}/".encode()
    pids = [name for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
    return [int(pid) for pid in pids if _carries(pid, mark, title)]


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def end_orphans(attempt: str, patience: float = 5.0) -> int:
    """End every process that carries `attempt` and wait until none is left. Returns how many there were.

    Raises NeedsOperator when one survives SIGKILL (uninterruptible sleep): nothing may be probed beside it.
    """
    found = carriers(attempt)
    for number, wait in ((signal.SIGTERM, patience), (signal.SIGKILL, 10.0)):
        _signal(carriers(attempt), number)
        try:
            wait_until(
                lambda: not _alive(carriers(attempt)), timeout=wait, interval=0.05, what="an orphaned play to end"
            )
            return len(found)
        except WaitTimeout:
            continue
    raise NeedsOperator(
        f"a process of an earlier controller cannot be ended (pid {carriers(attempt)})",
        remedy="see why it hangs (ps -o stat,wchan PID); then resume again",
    )


def _alive(pids: Sequence[int]) -> list[int]:
    def zombie(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
        except OSError:
            return True

    return [pid for pid in pids if not zombie(pid)]


def sweep(change: str) -> None:
    """Remove private directories that a dead controller of this change left."""
    for path in runtime_root().glob(f"{change}-*"):
        shutil.rmtree(path, ignore_errors=True)
