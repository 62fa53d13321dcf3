"""Hosts for engine tests: a world of plain data that survives the engine, and plays that act on it at once.

Each play looks before it acts and writes what it really did into `ledger`. `faults` says what goes wrong, once each.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuchange.player import Request
from gpuchange.providers.contract import Params, Provider
from gpuchange.reports import Evidence, Failed, Report, Reported, Silent, Unreachable

PROVIDERS = tuple(
    Provider(phase, name, "stands for the real one", Params, Report)
    for phase, name in (
        ("preflight", "host"),
        ("record", "host"),
        ("drain", "gpu_users"),
        ("seal", "host"),
        ("baseline", "gpu"),
        ("verify", "host"),
        ("watch", "host"),
    )
)
Key = tuple[str, str]  # (host, role)


@dataclass
class World:
    """`done`: (host, role) pairs applied. `faults`: (host, role, tasks) → failed|unreachable|silent|running."""

    done: set[Key] = field(default_factory=set)
    ledger: list[tuple[str, str, str]] = field(default_factory=list)
    faults: dict[tuple[str, str, str], list[str]] = field(default_factory=dict)
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)  # role → more report fields
    requests: list[Request] = field(default_factory=list)

    def play(self, request: Request, _log_dir: Path) -> FakePlay:
        self.requests.append(request)
        return FakePlay(self, request)

    def answer(self, request: Request, host: str) -> Evidence:
        faults = self.faults.get((host, request.role, request.tasks), [])
        fault = faults.pop(0) if faults else ""
        if fault == "unreachable":
            return Unreachable(host, "no route")
        if fault == "failed":
            return Failed(host, "it broke")
        if fault == "refused":
            return Failed(host, "this host belongs to change X", refused={"kind": "locked", "by": {"change": "X"}})
        self._act(request, host)
        if fault == "silent":
            return Silent(host, "no word")
        return Reported(host, self._report(request, host, "running" if fault == "running" else "done"), host)

    def _act(self, request: Request, host: str) -> None:
        key, applied = (host, request.role), (host, request.role) in self.done
        if request.tasks == "apply" and not applied:
            self.done.add(key)
            self.ledger.append((host, request.role, "apply"))
        if request.tasks == "undo" and applied:
            self.done.discard(key)
            self.ledger.append((host, request.role, "undo"))

    def _report(self, request: Request, host: str, state: str) -> dict[str, Any]:
        if request.tasks == "probe":
            wanted = request.shared["gpuchange_step"]["direction"] == "do"
            state = "done" if ((host, request.role) in self.done) == wanted else "not_done"
        return {"state": state, "machine_id": f"id-{host}", **self.reports.get(request.role, {})}


class FakePlay:
    """The shape of player.Play: everything is there as soon as it is asked for."""

    def __init__(self, world: World, request: Request) -> None:
        self.world, self.request, self.ended = world, request, False
        read, write = os.pipe()
        os.close(write)  # at once readable: end of file
        self._read = os.fdopen(read)

    def fileno(self) -> int:
        return self._read.fileno()

    def evidence(self) -> Iterator[Evidence]:
        for host in self.request.hosts:
            yield self.world.answer(self.request, host)
        self._read.close()
        self.ended = True

    def stop(self) -> None:
        self.ended = True
