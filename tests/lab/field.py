"""A lab whose hosts are given out one by one: changes of one host each, side by side, each begun on a fresh host."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from queue import Queue
from typing import Any

from changes import fingerprint, ledger, servers, since
from crashing import Controller, Tally, begun, failed_results, left_behind, make_home

from gpuchange.lab import Host, Lab

HOSTS = 7
SIDE_BY_SIDE = 4
DRAIN = {"provider": "haproxy", "balancers": ["loadbalancers"], "backend": "gpu", "min_serving": 0}
"""Several changes at once take their hosts out of one backend."""

Run = Callable[[Controller, Host], Tally]


@dataclass
class Ended:
    """What a run left: the host's looks before and after, what its ledger gained, which long works began on it, which
    of them did not end well, and what should be gone.
    """

    controller: Controller
    host: Host
    tally: Tally
    before: dict[str, list[str]]
    after: dict[str, list[str]]
    gained: dict[str, list[str]]
    begun: list[str]
    failed: dict[str, Any]
    left: list[str]

    def anonymous(self) -> dict[str, list[str]]:
        """The looks afterwards without what differs from host to host."""
        return {
            name: sorted(re.sub(r"GPU-[0-9a-f-]+", "GPU-?", line).replace(self.host.name, "HOST") for line in lines)
            for name, lines in self.after.items()
        }


class Field:
    """Gives out the hosts of a lab, one run a host at a time."""

    def __init__(self, lab: Lab, directory: Path) -> None:
        self.lab, self.directory = lab, directory
        self._numbers = count(1)
        self.free: Queue[tuple[Host, bool]] = Queue()
        for host in lab.gpu_hosts:
            self.free.put((host, False))

    @contextmanager
    def host(self) -> Iterator[Host]:
        """A host nobody else has, as first laid out and serving."""
        host, used = self.free.get()
        try:
            if used:
                self.renew(host)
            self.lab.wait_serving([host.name])
            yield host
        finally:
            self.free.put((host, True))

    def renew(self, host: Host) -> None:
        """Put the host back as first laid out, and in service; the balancer forgets whose it was."""
        host.restore("start")
        (self.lab.host("lb1").root / f"var/lib/gpuchange/owner-{host.name}.json").unlink(missing_ok=True)
        self.lab.haproxy(f"set server gpu/{host.name} state ready")

    def controller(self, name: str, host: Host, **plan: Any) -> Controller:
        """An operator's machine with a plan for this host."""
        directory = self.new_directory(name)
        controller = Controller(self.lab, directory, python=make_home(directory / "home"))
        controller.plan(**{"hosts": [host.name], "drain": [DRAIN], **plan})
        return controller

    def new_directory(self, name: str) -> Path:
        directory = self.directory / f"{next(self._numbers)}-{name}"
        directory.mkdir()
        return directory

    def carry(self, name: str, run: Run) -> Ended:
        with self.host() as host:
            return self._carry(self.controller(name, host), host, run)

    def _carry(self, controller: Controller, host: Host, run: Run) -> Ended:
        before, written = self.looks(host), ledger(host)
        tally = run(controller, host)
        left, works = left_behind(controller, host), begun(host, controller.id)
        gained, failed = since(written, ledger(host)), failed_results(host, controller.id)
        return Ended(controller, host, tally, before, self.looks(host), gained, works, failed, left)

    def looks(self, host: Host) -> dict[str, list[str]]:
        """The host's fingerprint and the balancer's word on it."""
        line = next(line for line in servers(self.lab) if line.startswith(f"{host.name} "))
        name, _address, *state_of = line.split()
        return {**fingerprint(host), "HAProxy": [" ".join([name, *state_of])]}


def repeated(run: Ended) -> list[str]:
    """Maintainer scripts of one package version that ran twice, and long works that failed on the way."""
    twice = [f"{line} ran {times} times" for line, times in Counter(run.gained["packages"]).items() if times > 1]
    return twice + [f"{name} failed: {said}" for name, said in run.failed.items()]


def overlaps(controller: Controller) -> list[str]:
    """Plays that began while one of an earlier controller of the same change still ran."""
    return [f"{gate.step} {gate.tasks} beside {', '.join(gate.beside)}" for gate in controller.gates if gate.beside]


def unlike(run: Ended, reference: Ended) -> list[str]:
    """How a run that was disturbed ended otherwise than one that was not; empty when in no way."""
    said = [f"exit {run.tally.code}: {run.controller.said()}"] if run.tally.code else []
    pairs = {
        "looks": (run.anonymous(), reference.anonymous()),
        "package scripts": (sorted(run.gained["packages"]), sorted(reference.gained["packages"])),
        "boots": (len(run.gained["boots"]), len(reference.gained["boots"])),
        "long works": (run.begun, reference.begun),
        "HAProxy": (run.before["HAProxy"], run.after["HAProxy"]),
    }
    said += [f"{name}: {mine} not {theirs}" for name, (mine, theirs) in pairs.items() if mine != theirs]
    return said + repeated(run) + overlaps(run.controller) + [f"left behind: {it}" for it in run.left]
