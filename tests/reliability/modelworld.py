"""Hosts for the state machine: what is true on each, who acted when, and a judge of every act.

An act is legal when it is the next one of its host's way: forward in the table's order, each step once, then back in
reverse, each undoable step once, never forward again; and no more hosts are drained than the limit allows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuchange.player import Request
from gpuchange.reports import Evidence, Failed, Reported, Silent, Unreachable
from tests.fleetfake import FakePlay

STEPS = ("preflight", "record", "drain", "seal", "baseline", "verify", "release", "watch")
DRAIN = "drain_gpu_users"
FAULTS = ("failed", "half", "silent", "mute", "unknown", "running", "unreachable")
"""failed: nothing done. half: half done. silent: done, no word. mute: not done, no word. unknown: done, cannot tell."""
Key = tuple[str, str]  # host, role


class Crash(BaseException):
    """The controller dies at this moment."""


@dataclass
class Way:
    """How far a host went, by position in STEPS; `back`: the last position undone, None while it goes forward."""

    forward: int = -1
    back: int | None = None


@dataclass
class World:
    limit: int
    applied: set[Key] = field(default_factory=set)
    half: set[Key] = field(default_factory=set)
    works: set[Key] = field(default_factory=set)  # begun, to be looked at once more
    faults: dict[tuple[str, str, str], str] = field(default_factory=dict)  # host, role, tasks → what goes wrong next
    ways: dict[str, Way] = field(default_factory=dict)
    going_back: set[str] = field(default_factory=set)  # ordered back: nothing may begin on them
    wrong: list[str] = field(default_factory=list)
    acts: int = 0
    answers_left: int = -1  # answers until the controller dies; below 0: never
    careless: bool = False  # a look never finds anything done, as with a tool that does not look

    def play(self, request: Request, _log_dir: Path) -> FakePlay:
        return FakePlay(self, request)  # type: ignore[arg-type]

    def drained(self) -> set[str]:
        return {host for host, role in self.applied | self.half if role == DRAIN}

    def answer(self, request: Request, host: str) -> Evidence:
        found = self._answer(request, host)
        if self.answers_left == 0:
            self.answers_left = -1
            raise Crash
        self.answers_left -= self.answers_left > 0
        return found

    def _answer(self, request: Request, host: str) -> Evidence:
        if request.role == "owner_marker":
            return Reported(host, {"state": "done"}, host)
        fault = self.faults.pop((host, request.role, request.tasks), "")
        if fault == "unreachable":
            return Unreachable(host, "no route")
        if request.tasks == "probe":
            return self._probe(request, host, fault)
        if fault == "mute":
            return Silent(host, "no word")
        if fault == "failed":
            return Failed(host, "it broke")
        return self._acted(request, host, fault)

    def _probe(self, request: Request, host: str, fault: str) -> Evidence:
        key, wanted = (host, request.role), request.shared["gpuchange_step"]["direction"] == "do"
        if fault in ("failed", "half"):
            return Failed(host, "the look broke")
        if fault in ("silent", "mute"):
            return Silent(host, "no word")
        there = key not in self.half and (key in self.applied) == wanted and not self.careless
        return self._report(host, "unknown" if fault == "unknown" else "done" if there else "not_done")

    def _acted(self, request: Request, host: str, fault: str) -> Evidence:
        key = (host, request.role)
        if key in self.works:  # a look at work that was begun: a second start attaches
            self.works.discard(key)
        elif fault == "half":
            self.half.add(key)
            return Failed(host, "it broke half-way")
        else:
            self._act(request, host, key)
        if fault == "silent":
            return Silent(host, "no word")
        if fault == "running":
            self.works.add(key)
        return self._report(host, fault if fault in ("unknown", "running") else "done")

    def _act(self, request: Request, host: str, key: Key) -> None:
        step, applying = request.shared["gpuchange_step"], request.tasks == "apply"
        position = STEPS.index(step["phase"])
        self._judge(host, position, forward=applying != (step["phase"] == "release"))
        self.acts += 1
        self.half.discard(key)
        (self.applied.add if applying else self.applied.discard)(key)
        if len(self.drained()) > self.limit:
            self.wrong.append(f"{sorted(self.drained())} are out at once, {self.limit} may be")

    def _judge(self, host: str, position: int, *, forward: bool) -> None:
        way, what = self.ways.setdefault(host, Way()), f"{host} {STEPS[position]} {'do' if forward else 'undo'}"
        if forward:
            legal = way.back is None and position > way.forward and host not in self.going_back
            way.forward = max(way.forward, position)
        else:
            legal = position < (len(STEPS) if way.back is None else way.back)
            way.back = position
        if not legal:
            self.wrong.append(f"{what} after {way}: repeated, out of order, or begun on a host that goes back")

    def by_hand(self, host: str, phase: str, direction: str) -> None:
        """The operator does a step himself, then says that it is done."""
        role = DRAIN if phase in ("drain", "release") else next(r for r in self.roles() if r.startswith(phase + "_"))
        key, applying = (host, role), (direction == "do") != (phase == "release")
        self._judge_by_hand(host, STEPS.index(phase), direction == "do")
        self.half.discard(key)
        self.works.discard(key)
        (self.applied.add if applying else self.applied.discard)(key)

    def _judge_by_hand(self, host: str, position: int, forward: bool) -> None:
        way = self.ways.setdefault(host, Way())
        if forward:
            way.forward = max(way.forward, position)
        else:
            way.back = position

    @staticmethod
    def roles() -> Iterator[str]:
        yield from ("preflight_host", "record_host", DRAIN, "seal_host", "baseline_gpu", "verify_host", "watch_host")

    @staticmethod
    def _report(host: str, state: str) -> Evidence:
        body: dict[str, Any] = {"state": state, "why": state, "machine_id": f"id-{host}"}
        return Reported(host, body, host)
