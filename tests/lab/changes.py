"""Changes on lab hosts as an operator runs them: plans, the command line, journals, and what a host looks like.

Everything is looked at from outside (past the network, past gpuchange), so that a test never takes the product's word.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from gpuchange.journal import Journal
from gpuchange.lab import Host, Lab
from gpuchange.lab.load import Load, Tally
from gpuchange.states import Event, Kind
from gpuchange.waiting import wait_until

ROOT = Path(__file__).parents[2]
CLI = [sys.executable, "-m", "gpuchange"]
TIMEOUT = 900.0  # seconds for a whole change on a crowded machine; alone it takes about 100

OLD_DRIVER, NEW_DRIVER = "550.54.15", "570.172.08"


def plan_for(lab: Lab, **overrides: Any) -> dict[str, Any]:
    """A plan that carries the lab from 550 to 570 with CUDA, cuDNN and toolkit. A mapping in `overrides` is laid over
    the one here key by key, everything else replaces, None takes the key out.
    """
    plan: dict[str, Any] = {
        "version": 1,
        "name": "cuda-12.8",
        "reason": "CUDA 12.8 for the new models",
        "ticket": "OPS-1",
        "inventory": str(lab.inventory),
        "hosts": ["gpu_hosts"],
        "rollout": {"max_unavailable": 1, "canary": 1, "stop_after_failures": 1, "unreachable_timeout": "60s"},
        "gpu_users": {"policy": "stop", "timeout": "1m", "services": ["modelserver.service"]},
        "record": {"paths": ["/srv/models"]},
        "drain": [{"provider": "haproxy", "balancers": ["loadbalancers"], "backend": "gpu", "timeout": "1m"}],
        "stack": {"provider": "apt", "driver": NEW_DRIVER, "cuda": "12.8.1", "cudnn": "9.8.0"}
        | {"container_toolkit": "1.17.8"},
        "watch": {"for": "3s"},
    }
    for key, value in overrides.items():
        both = isinstance(value, Mapping) and isinstance(plan.get(key), dict)
        plan[key] = {**plan[key], **value} if both else value
    return {key: value for key, value in plan.items() if value is not None}


@dataclass(frozen=True)
class Said:
    """What one run of the command line said."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def text(self) -> str:
        return self.out + self.err

    def ended(self, code: int) -> Said:
        """This, or an AssertionError with everything that was said."""
        assert self.code == code, f"exit {self.code}, not {code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"
        assert "Traceback" not in self.text, self.text
        return self


@dataclass(frozen=True)
class Operator:
    """Someone with a plan file and a state directory of their own, both below `directory`."""

    lab: Lab
    directory: Path

    @property
    def state(self) -> Path:
        return self.directory / "state"

    @property
    def environment(self) -> dict[str, str]:
        own = {"GPUCHANGE_STATE": str(self.state), "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
        return {**os.environ, **own}

    def plan(self, name: str = "plan", **overrides: Any) -> str:
        """Write a plan file (see plan_for) and return its path."""
        path = self.directory / f"{name}.yaml"
        path.write_text(yaml.safe_dump(plan_for(self.lab, **overrides), sort_keys=False))
        return str(path)

    def start(self, *args: str) -> subprocess.Popen[str]:
        """Begin a command line in a session of its own; end it with `finish`, or kill it."""
        return subprocess.Popen(
            [*CLI, *args], env=self.environment, cwd=self.directory, text=True, errors="replace",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def finish(self, process: subprocess.Popen[str], timeout: float = TIMEOUT) -> Said:
        """Wait for it; after `timeout` seconds it is stopped as Ctrl-C would, then killed, and the test fails."""
        began = time.monotonic()
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            out, err = _stopped(process)
            raise AssertionError(f"did not end within {timeout:g} s\n{out}\n{err}") from None
        return Said(process.returncode, out, err, time.monotonic() - began)

    def run(self, *args: str, timeout: float = TIMEOUT) -> Said:
        return self.finish(self.start(*args), timeout)

    # -- journals -----------------------------------------------------------------------------------------------------

    def change(self) -> Path:
        """The directory of the latest change."""
        found = sorted(path for path in self.state.iterdir() if (path / "journal.db").exists())
        assert found, f"no change under {self.state}"
        return found[-1]

    def events(self, change: Path | None = None) -> list[Event]:
        """The journal of a change (default: the latest), readable also while it is written."""
        with Journal.open((change or self.change()) / "journal.db", readonly=True) as journal:
            return list(journal.events())

    def await_event(self, wanted: Callable[[Event], bool], what: str, timeout: float = TIMEOUT) -> Event:
        """Wait until the latest change's journal has such an event."""
        seen: list[Event] = []

        def there() -> bool:
            if self.state.is_dir() and any(self.state.glob("[!.]*/journal.db")):
                seen.extend([event for event in self.events() if wanted(event)][:1])
            return bool(seen)

        wait_until(there, timeout=timeout, what=what, interval=0.1)
        return seen[0]


def _stopped(process: subprocess.Popen[str]) -> tuple[str, str]:
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGKILL):
        process.send_signal(number)
        try:
            return process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            continue
    return "", "it does not even die"


def began(kind: Kind, phase: str, host: str = "", direction: str = "do") -> Callable[[Event], bool]:
    """Tells events of this kind, phase, direction and (if given) host."""
    return lambda event: (
        (event.kind, event.phase, event.direction) == (kind, phase, direction) and host in ("", event.host)
    )


def drained(events: list[Event]) -> list[str]:
    """The hosts that this change began to take out of service, in that order."""
    began_ = (e.host for e in events if e.kind is Kind.STARTED and e.phase == "drain" and e.direction == "do")
    return list(dict.fromkeys(began_))


def most_out(events: list[Event], balancer: str = "haproxy") -> int:
    """The most hosts out of service at one moment, told from the journal's intents and outcomes alone: out from the
    first intent to drain (or to undo the release) until the release (or drain's undo) by `balancer` is accepted.
    """
    leaves = {("drain", "do"), ("release", "undo")}
    returns = {("release", "do"), ("drain", "undo")}
    out: set[str] = set()
    most = 0
    for event in events:
        way = (event.phase, event.direction)
        if event.kind is Kind.STARTED and way in leaves:
            out.add(event.host)
        elif event.kind is Kind.ACCEPTED and way in returns and event.provider == balancer:
            out.discard(event.host)
        most = max(most, len(out))
    return most


# -- what a host looks like -------------------------------------------------------------------------------------------

_LOOKS = {
    "packages": "dpkg-query -W -f='${db:Status-Abbrev} ${Package}:${Architecture} ${Version}\\n'",
    "holds": "apt-mark showhold",
    "auto": "apt-mark showauto",
    "alternatives": "update-alternatives --get-selections",
    "unit files": "systemctl list-unit-files --no-legend --no-pager --state=enabled,masked",
    "services": "systemctl list-units --no-legend --no-pager --plain --type=service --state=active"
    " | sed 's/ .*//' | grep -v -e '^gpuchange-' -e '^user' -e '^systemd-tmpfiles-clean'",
    "failed units": "systemctl list-units --no-legend --no-pager --plain --state=failed",
    "apt configuration": "find /etc/apt -type f -print0 | sort -z | xargs -0 sha256sum",
    "modules on disk": "find /lib/modules -name 'nvidia*' | sort | xargs -r sha256sum",
    "models": "cd /srv/models && find . -type f -print0 | sort -z | xargs -0 sha256sum;"
    " find . -printf '%p %y %m %u %g %s %T@ %l\\n' | sort",
    "driver loaded": "cat /proc/driver/nvidia/version",
    "cards": "nvidia-smi --query-gpu=uuid,driver_version,ecc.mode.current,mig.mode.current --format=csv,noheader",
}


def fingerprint(host: Host) -> dict[str, list[str]]:
    """Everything of a GPU host that a rolled back change must have put back, as sorted lines a heading."""
    script = "".join(f"echo '== {name}'; {{ {command}; }} 2>&1;" for name, command in _LOOKS.items())
    shown: dict[str, list[str]] = {}
    for line in host.run(["sh", "-c", script + " true"]).splitlines():
        if line.startswith("== "):
            lines = shown.setdefault(line[3:], [])
        else:
            lines.append(re.sub(r"\s+", " ", line).strip())
    return {name: sorted(lines) for name, lines in shown.items()}


def fingerprints(lab: Lab) -> dict[str, dict[str, list[str]]]:
    """Every GPU host's fingerprint, and the load balancer's word on each server."""
    with ThreadPoolExecutor(len(lab.gpu_hosts)) as each:
        looks = each.map(fingerprint, lab.gpu_hosts)
        hosts = {host.name: look for host, look in zip(lab.gpu_hosts, looks, strict=True)}
    return {**hosts, "HAProxy": {"servers": servers(lab)}}


def differences(before: Mapping[str, Mapping[str, list[str]]], after: Mapping[str, Mapping[str, list[str]]]) -> str:
    """The lines that differ between two `fingerprints`, "" when none does."""
    told = []
    for host, looks in before.items():
        for name, lines in looks.items():
            now = after[host][name]
            told += [f"{host}, {name}: - {line}" for line in lines if line not in now]
            told += [f"{host}, {name}: + {line}" for line in now if line not in lines]
    return "\n".join(told)


# show servers state, by position: name, address, operational and admin state, weights, port. Not: times and checks.
_SERVER_FIELDS = (3, 4, 5, 6, 7, 8, 18)


def servers(lab: Lab) -> list[str]:
    """HAProxy's own state of each server of the backend gpu: name, address, states, weights, port."""
    rows = [line.split() for line in lab.haproxy("show servers state gpu").splitlines() if line[:1].isdigit()]
    return sorted(" ".join(row[at] for at in _SERVER_FIELDS) for row in rows if len(row) > max(_SERVER_FIELDS))


def boot_id(host: Host) -> str:
    return host.run(["cat", "/proc/sys/kernel/random/boot_id"]).strip()


def ledger(host: Host) -> dict[str, list[str]]:
    """What the host itself wrote down of package scripts run and boots, without the times: {"packages", "boots"}."""
    folder = host.root / "var/log/gpuchange-lab"
    return {
        name: [line.partition(" ")[2].strip() for line in (folder / f"{name}.log").read_text().splitlines()]
        for name in ("packages", "boots")
    }


def since(before: Mapping[str, list[str]], after: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """What a ledger gained."""
    for name, lines in before.items():
        assert after[name][: len(lines)] == lines, f"the {name} ledger was rewritten"
    return {name: lines[len(before[name]) :] for name, lines in after.items()}


def loaded_driver(host: Host) -> str:
    found = re.search(r"Kernel Module\s+(\S+)", host.run(["cat", "/proc/driver/nvidia/version"]))
    assert found, f"{host.name}: no driver is loaded"
    return found[1]


def owner_marker(host: Host) -> bool:
    """Whether a change still owns the host."""
    return (host.root / "var/lib/gpuchange/owner.json").exists()


# -- load -------------------------------------------------------------------------------------------------------------


@dataclass
class Watched:
    """What a client and a look at HAProxy saw meanwhile. `most_down`: the most servers not UP at one moment."""

    tally: Tally = field(default_factory=Tally)
    most_down: int = 0
    looks: int = 0

    def nothing_failed(self) -> None:
        """AssertionError unless every request was answered, at 50 a second and with streams, all along."""
        summary = self.tally.summary()
        assert summary["failed"] == 0, summary
        assert summary["per_second"] >= 50 and summary["streams_ok"] > 0, summary


@contextmanager
def under_load(lab: Lab) -> Iterator[Watched]:
    """A client without retries (60 requests a second, a 5 s stream every 2 s) is at work inside this block, and
    HAProxy is asked 5 times a second who serves. The numbers are complete when the block has ended.
    """
    watched, over = Watched(), threading.Event()
    load = Load(lab.lb_url, rate=60)
    watched.tally = load.tally
    client = threading.Thread(target=load.run, args=(over.is_set,))
    look = threading.Thread(target=_look, args=(lab, watched, over))
    for thread in (client, look):
        thread.start()
    try:
        wait_until(lambda: load.tally.ok > 60, timeout=30, what="the first requests to be answered", interval=0.1)
        yield watched
    finally:
        over.set()
        for thread in (client, look):
            thread.join(timeout=60)
    assert not client.is_alive() and watched.looks, "the client or the looks at HAProxy did not end"


def _look(lab: Lab, watched: Watched, over: threading.Event) -> None:
    while not over.wait(0.2):
        down = [name for name, word in lab.serving().items() if word != "UP"]
        watched.most_down = max(watched.most_down, len(down))
        watched.looks += 1
