"""Twelve secrets where an operator keeps secrets, and every place that a change writes to: none of them gets there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from changes import Operator
from reliability.figures import Effort, Figures, Row
from terminal import Typed
from test_least_privilege import ASKING, let_in

from gpuchange.journal import Journal
from gpuchange.lab import Lab
from gpuchange.waiting import wait_until

ROW = Row(
    "No secret reaches a file, a process list, a terminal, a log or a host, at any verbosity, however a change ends",
    peer="ansible-runner: secrets of the environment and of extra variables in 4 of the places looked at",
    source="ansible-runner 2.4.3 artifacts/*/command, env/extravars, process list, worker stream",
)
PASSWORD = f"kanarie-typed-{os.getpid()}"  # other tests run beside this one, with passwords of their own
CANARY = "kanarie-{:02d}-9f31c7"
PLACES = (
    "vault password", "vaulted file", "vaulted value", "environment", "cloud key in the environment", "typed password",
    "hook on controller", "hook on host", "extra variables file", "file by lookup", "vault password script",
    "ssh key's comment",
)  # fmt: skip
OUTCOMES = ("failed", "unreachable", "killed", "interrupted", "success")  # success last: then nothing is left to do
VERBOSITIES = ((), ("-v",), ("-vvv",))
SHORT = (("success", ("-vvv",)), ("killed", ("-vvv",)), ("failed", ()))


@dataclass
class Site:
    """An operator's files with a canary at each place, and how to call gpuchange there."""

    operator: Operator
    lab: Lab
    canaries: dict[str, str] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    plan: str = ""

    @property
    def env(self) -> dict[str, str]:
        return {
            "MY_TOKEN": self.canaries["environment"],
            "AWS_SECRET_ACCESS_KEY": self.canaries["cloud key in the environment"],
        }


def encrypted(text: str, passwords: Path, *more: str) -> str:
    vault = [sys.executable, "-m", "ansible", "vault", "encrypt_string", "--vault-id", f"a@{passwords}", *more]
    done = subprocess.run([*vault, "--stdin-name", "bmc_token"], input=text, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.fixture
def site(lab: Lab, tmp_path: Path) -> Site:
    made = Site(Operator(lab, tmp_path), lab)
    made.canaries = {place: CANARY.format(number) for number, place in enumerate(PLACES)} | {"typed password": PASSWORD}
    own, seen = tmp_path / "own", made.canaries
    (own / "group_vars").mkdir(parents=True)
    for name, place in (("vault", "vault password"), ("ipmi", "file by lookup"), ("hook", "hook on controller")):
        (own / name).write_text(seen[place])
    script = own / "second-vault"
    script.write_text(f"#!/bin/sh\necho {seen['vault password script']}\n")
    script.chmod(0o700)
    inventory(made, own)
    (own / "group_vars/all.yml").write_text(
        encrypted(seen["vaulted value"], own / "vault") + f"ipmi_password: \"{{{{ lookup('file', '{own}/ipmi') }}}}\"\n"
    )
    whole = own / "group_vars/gpu_hosts.yml"
    whole.write_text(f"bmc_password: {seen['vaulted file']}\n")
    subprocess.run(
        [sys.executable, "-m", "ansible", "vault", "encrypt", "--vault-id", f"a@{own}/vault", str(whole)],
        check=True, capture_output=True,
    )  # fmt: skip
    (own / "more.yml").write_text(f"snmp_secret: {seen['extra variables file']}\n")
    let_in(lab, "gpu1", ASKING, PASSWORD)
    lab.host("gpu1").run(["sh", "-c", f"umask 077; echo {seen['hook on host']} > /root/hook-secret"])
    made.flags = ["-K", "--vault-id", f"a@{own}/vault", "--vault-id", f"b@{script}", "-e", f"@{own}/more.yml"]
    hooks = {
        "before_drain": [
            {"command": ["/bin/sh", "-c", f'test -n "$(cat {own}/hook)"'], "on": "controller"},
            {"command": ["/bin/sh", "-c", 'test -n "$(cat /root/hook-secret)"'], "on": "host"},
        ]
    }
    made.plan = made.operator.plan(inventory=str(own / "hosts.yaml"), hooks=hooks)
    return made


def inventory(site: Site, own: Path) -> None:
    """gpu1 as the account `ops`, with a key whose comment is a canary."""
    data = yaml.safe_load(site.lab.inventory.read_text())
    hosts = data["all"]["children"]["gpu_hosts"]["hosts"]
    key = own / "key"
    key.write_bytes(Path(hosts["gpu1"]["ansible_ssh_private_key_file"]).read_bytes())
    key.chmod(0o600)
    comment = ["ssh-keygen", "-q", "-c", "-C", site.canaries["ssh key's comment"], "-P", "", "-f", str(key)]
    subprocess.run(comment, check=True, capture_output=True)
    mine = {"ansible_user": "ops", "ansible_become": True, "ansible_ssh_private_key_file": str(key)}
    data["all"]["children"]["gpu_hosts"]["hosts"] = {"gpu1": {**hosts["gpu1"], **mine}}
    (own / "hosts.yaml").write_text(yaml.safe_dump(data))


# -- the sinks --------------------------------------------------------------------------------------------------------


def files(root: Path, since: float) -> Iterator[tuple[str, bytes]]:
    """Regular files below `root` that were written since then, up to 64 MiB each."""
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            try:
                status = path.lstat()
                if path.is_file() and not path.is_symlink() and status.st_mtime >= since and status.st_size < 1 << 26:
                    yield str(path), path.read_bytes()
            except OSError:
                continue


def process_list() -> Iterator[tuple[str, bytes]]:
    """Command lines of this machine's processes, those of the lab hosts included."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            yield f"process list ({pid})", Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue


def passing(site: Site) -> Iterator[tuple[str, bytes]]:
    """What is there only while plays run."""
    yield from process_list()
    yield from files(Path(f"/run/gpuchange-{os.getuid()}"), 0)
    yield from files(site.operator.state, 0)
    root = site.lab.host("gpu1").root
    for place in ("tmp", "var/tmp", "var/lib/gpuchange", "home/ops", "root/.ansible"):
        yield from files(root / place, 0)


def lasting(site: Site, since: float) -> Iterator[tuple[str, bytes]]:
    """What is left: files here and on the host, the host's journal, bodies of the journal, and what the verbs print."""
    yield from passing(site)
    for name in os.listdir("/tmp"):
        if name.startswith(("gpuchange", "ansible", "tmp")):
            yield from files(Path("/tmp", name), since)
            yield name, Path("/tmp", name).read_bytes() if Path("/tmp", name).is_file() else b""
    yield "host journal", site.lab.host("gpu1").run(["journalctl", "--no-pager", "-o", "cat"]).encode()
    for path in site.operator.state.glob("[!.]*/journal.db"):
        with Journal.open(path, readonly=True) as journal:
            for event in journal.events():
                yield f"event {event.seq}", repr(event).encode()
                yield f"report {event.seq}", repr(journal.body(event.body) if event.body else "").encode()
    for verb in (("show", "--json"), ("report",), ("status", "--json")):
        yield " ".join(verb), site.operator.run(*verb).text.encode() if site.operator.state.is_dir() else b""


@dataclass
class Looker:
    """Looks at the passing sinks as long as it is open. A canary's own place does not count."""

    site: Site
    found: set[str] = field(default_factory=set)
    looks: int = 0

    def look(self, sinks: Iterator[tuple[str, bytes]]) -> None:
        marks = {place: canary.encode() for place, canary in self.site.canaries.items()}
        for name, data in sinks:
            self.looks += 1
            self.found |= {f"{place} in {name}" for place, mark in marks.items() if mark in data}

    def __enter__(self) -> Looker:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._loop)
        self._thread.start()
        return self

    def _loop(self) -> None:
        while not self._over.wait(0.2):
            self.look(passing(self.site))

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


# -- outcomes ---------------------------------------------------------------------------------------------------------


def at_work(site: Site) -> bool:
    """Whether a play of this operator's changes is under way."""
    changes = site.operator.state.glob("[!.]*") if site.operator.state.is_dir() else ()
    return any(any(Path(f"/run/gpuchange-{os.getuid()}").glob(f"{change.name}-*/artifacts")) for change in changes)


def carry_out(site: Site, outcome: str, verbosity: tuple[str, ...], whole: bool) -> tuple[int, str]:
    """One command line that ends as `outcome` says."""
    host = site.lab.host("gpu1")
    answer = "not-it" if outcome == "failed" else site.canaries["typed password"]
    verb = ["apply", site.plan, "--yes"] if outcome in ("killed", "interrupted") or whole else ["plan", site.plan]
    if outcome == "unreachable":
        host.unplug()
    try:
        typed = Typed(site.operator, [*verb, *site.flags, *verbosity], answer, site.env)
        if outcome in ("killed", "interrupted"):
            wait_until(lambda: at_work(site), timeout=90, what="a play", interval=0.05)
            time.sleep(1.0)  # let it get to the host; when exactly does not matter
            typed.process.send_signal(signal.SIGKILL if outcome == "killed" else signal.SIGINT)
            if outcome == "interrupted":
                typed.process.send_signal(signal.SIGINT)
        return typed.end()
    finally:
        if outcome == "unreachable":
            host.plug()


EXPECTED = {"success": (0,), "failed": (1,), "unreachable": (4,), "killed": (-9,), "interrupted": (130,)}


@pytest.mark.timeout(3000)
def test_no_secret_gets_anywhere(site: Site, effort: Effort, figures: Figures) -> None:
    runs = [(o, v) for o in OUTCOMES for v in VERBOSITIES] if effort.full else list(SHORT)
    for outcome, verbosity in runs:
        since, seen = time.time() - 1, Looker(site)
        with seen:
            code, text = carry_out(site, outcome, verbosity, whole=effort.full and not verbosity)
        seen.look(iter([("terminal", text.encode())]))
        seen.look(lasting(site, since))
        figures.tried += len(PLACES)
        figures.count(sinks=seen.looks, runs=1)
        figures.broken += [f"{outcome} {verbosity}: {found}" for found in sorted(seen.found)]
        if code not in EXPECTED[outcome]:
            figures.broken.append(f"{outcome} {verbosity}: exit {code}\n{text[-1500:]}")


def test_this_test_can_fail(site: Site) -> None:
    """A canary on a process list is found, and one in a file of the host."""
    seen = Looker(site)
    canary = site.canaries["environment"]
    with subprocess.Popen([sys.executable, "-c", "input()", canary], stdin=subprocess.PIPE) as process:
        seen.look(process_list())
        process.kill()
    site.lab.host("gpu1").run(["sh", "-c", f"echo {canary} > /var/tmp/found"])
    seen.look(passing(site))
    site.lab.host("gpu1").run(["rm", "/var/tmp/found"])
    assert any("/var/tmp/found" in found for found in seen.found)
    assert any("process list" in found for found in seen.found)
