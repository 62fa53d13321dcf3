"""The loop: decide, write the intent, play, judge the evidence, write the outcome.

One thread writes the journal. Nothing here knows a phase or a provider by name, except that preflight comes before
any change. See ARCHITECTURE.md; the planner decides what may start, judging.py what evidence means.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpuchange import confirming, locking, ssh
from gpuchange.change import Change, Connection
from gpuchange.checks import fingerprint
from gpuchange.errors import BeforeChangeError
from gpuchange.judging import Outcome, Situation, judge
from gpuchange.observers import Observer, tell
from gpuchange.planner import Decision, Start, Step, decide, exit_code, resumable
from gpuchange.player import Play, Request, end_orphans, sweep
from gpuchange.providers.contract import Provider
from gpuchange.reports import Evidence, Failed, Reported
from gpuchange.states import Event, Kind, Status

IN_FLIGHT = {Status.DOING, Status.LOOKING, Status.UNDOING, Status.UNDO_LOOKING}
OWNER_ROLE = "owner_marker"
STILL_AS_REVIEWED = {"preflight", "record", "seal"}  # the phases that look before this change alters the host itself
TICK = 1.0


class Engine:
    """Carries one change forward until nothing more may start. Raises LockedError when another controller has it."""

    def __init__(
        self,
        home: Path,
        connection: Connection,
        observers: Sequence[Observer] = (),
        player: Callable[[Request, Path], Play] = Play,
    ) -> None:
        self.change = Change.open(home)
        self.connection = connection
        self.observers = list(observers)
        self.player = player
        self.plays: dict[int, tuple[Play, Start]] = {}
        self.stopping = False
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._attempts = 0
        self._fence = 0
        self._controller = f"{os.uname().nodename}:{os.getpid()}:{time.time_ns():x}"
        self._boot = locking.boot()
        self._started = False

    # -- from outside -------------------------------------------------------------------------------------------------

    def stop(self, hard: bool = False) -> None:
        """Start nothing new and end when what is in flight has ended; `hard`: end the plays too. Signal-safe."""
        self.stopping = True
        self._wake_write.send(b"h" if hard else b"s")

    def run(self, *, last_phase: str = "", only_back: bool = False) -> int:
        """Carry on; returns the exit code (design section 8). With `last_phase` nothing after that phase starts, with
        `only_back` nothing but on hosts that were turned back.
        """
        if not self._started:
            self._take_over()
        while True:
            decision = self._decide(last_phase, only_back)
            for host, why in decision.turns:
                self._append([Event(Kind.TURNED, host=host, data={"why": why})])
            if decision.turns:
                continue
            for start in decision.starts:
                self._start(start)
            if not self.plays and not decision.starts and decision.finished:
                break
            self._wait(decision.wake_at)
        return exit_code(self.change.state)

    def note(self, event: Event) -> None:
        """Write into the journal what others learned while the engine has it open."""
        self._append([event])

    def close(self) -> None:
        """Give the owner markers of finished hosts back, note the end, let go of journal and connections."""
        try:
            self._release_markers()
            self._append([Event(Kind.ENDED, data={"code": exit_code(self.change.state)})])
        finally:
            end_orphans(self.change.id)
            sweep(self.change.id)
            self.change.journal.close()
            for held in (self._selector, self._wake_read, self._wake_write):
                held.close()

    # -- start and end ------------------------------------------------------------------------------------------------

    def _take_over(self) -> None:
        ended = end_orphans(self.change.id)
        sweep(self.change.id)
        (self.change.home / "pause").unlink(missing_ok=True)
        earlier = [event for event in self.change.journal.events() if event.kind == Kind.CONTROLLER]
        self._attempts = sum(1 for event in self.change.journal.events() if event.attempt)
        self._fence = 1 + max((int(event.data["fence"]) for event in earlier), default=0)
        data = {"id": self._controller, "fence": self._fence, "pid": os.getpid(), "boot": self._boot, "orphans": ended}
        lost = [
            self._step_event(Kind.LOST, host, step, direction, data={"why": "the controller ended", "after": 0.0})
            for host, step, direction in self._in_flight()
        ]
        again = [
            self._step_event(Kind.RETRY, host, step, direction, data={"why": "resumed"})
            for host, step, direction in resumable(self.change.state)
        ]
        self._append([Event(Kind.CONTROLLER, data=data), *lost, *again])
        self._started = True
        self._knock()

    def _knock(self) -> None:
        """Every machine of the change is who known_hosts says, or the operator accepts it now, before any play."""
        variables = self.change.meta["ssh"]
        addresses = {name: address for name, given in variables.items() if (address := ssh.resolve(name, given))}
        found = ssh.knock(list(addresses.values()))
        unknown = [reach for reach in found.values() if reach.state == "unknown_key"]
        if self.connection.accept_new_host_keys:
            for reach in unknown:
                ssh.accept(addresses[reach.name], reach.key)
                self._append([Event(Kind.NOTE, host=reach.name, data={"host_key_accepted": reach.fingerprint})])
            unknown = []
        changed = [reach for reach in found.values() if reach.state == "changed_key"]
        if (unknown or changed) and not self.change.state.counts.touched:
            raise BeforeChangeError(
                "; ".join(reach.why for reach in [*changed, *unknown]),
                why="\n  ".join(f"{reach.name}: {reach.fingerprint}" for reach in [*changed, *unknown]),
                remedy="compare the fingerprints with the machines' own (ssh-keygen -lf); "
                + ("then mend known_hosts" if changed else "then go on with --accept-new-host-keys"),
            )

    def _in_flight(self) -> list[tuple[str, Step, str]]:
        found = []
        for host, standing in self.change.state.hosts.items():
            for step in self.change.state.table.steps:
                status = standing.steps[step.key].status
                if status in IN_FLIGHT:
                    found.append((host, step, "undo" if status.value.startswith("undo") else "do"))
        return found

    def _release_markers(self) -> None:
        state = self.change.state
        hosts = tuple(
            host
            for host, standing in state.hosts.items()
            if standing.ended_well and not standing.unmarked and standing.begun
        )
        if not hosts or not self._started:
            return
        attempt = self._new_attempt()
        play = self.player(
            self._request(attempt, OWNER_ROLE, "apply", hosts, {h: {} for h in hosts}, {}), self._artifacts()
        )
        for item in self._finish(play):
            if isinstance(item, Reported):
                self._append([Event(Kind.NOTE, host=item.host, data={"unmarked": True})])

    def _finish(self, play: Play) -> list[Evidence]:
        found: list[Evidence] = []
        with selectors.DefaultSelector() as selector:
            selector.register(play, selectors.EVENT_READ)
            while not play.ended:
                selector.select(TICK)
                found += play.evidence()
        return found

    def probe(self, step: Step, hosts: Sequence[str]) -> list[Evidence]:
        """Look at one step of these hosts without an intent: for dry runs. Journals nothing."""
        provider, _ = self.change.provider(step.phase.do.phase, step.provider)
        args = {host: provider.args(self.change.view(host, step, "do"), "probe") for host in hosts}
        asked = {"phase": step.phase.name, "provider": step.provider, "direction": "do"}
        attempt = self._new_attempt()
        request = self._request(attempt, provider.role, "probe", hosts, args, asked)
        return self._finish(self.player(request, self._artifacts()))

    # -- deciding and starting ----------------------------------------------------------------------------------------

    def _take_notes(self) -> None:
        """What operators left for us. Journalled before the file goes: killed in between, it is found out of date."""
        for path, note in confirming.left(self.change.home):
            if note is not None and self.change.hands.fits(note):
                self._append([note])
            path.unlink(missing_ok=True)

    def _decide(self, last_phase: str, only_back: bool) -> Decision:
        self._take_notes()
        if (self.change.home / "pause").exists():
            self.stopping = True
        return decide(
            self.change.state,
            self.change.limits,
            time.monotonic(),
            stopping=self.stopping,
            last_phase=last_phase,
            only_back=only_back,
        )

    def _start(self, start: Start) -> None:
        step = self.change.state.table.step(start.phase, start.provider)
        moved = self._moved(step, start)
        attempt = self._new_attempt()
        kind = Kind.PROBING if start.tasks == "probe" else Kind.STARTED
        self._append([self._step_event(kind, host, step, start.direction, attempt=attempt) for host in start.hosts])
        self._append([self._step_event(Kind.REJECTED, host, step, "do", data=moved[host]) for host in moved])
        provider, _ = self.change.provider(step.play(start.direction).phase, start.provider)
        args = self._arguments(provider, step, replace(start, hosts=tuple(h for h in start.hosts if h not in moved)))
        if not args:
            return
        role_step = {"phase": start.phase, "provider": start.provider, "direction": _aimed(start)}
        request = self._request(attempt, provider.role, start.tasks, tuple(args), args, role_step)
        play = self.player(request, self._artifacts())
        self.plays[play.fileno()] = (play, start)
        self._selector.register(play, selectors.EVENT_READ)

    def _moved(self, step: Step, start: Start) -> dict[str, dict[str, Any]]:
        """Hosts about to be taken out of service that are no longer as they were reviewed: a fresh look at each."""
        reviewed, hosts = self.change.reviewed, self.change.state.hosts
        asked = [host for host in start.hosts if host in reviewed and not hosts[host].out]
        if not asked or not step.phase.takes_out or (start.direction, start.tasks) != ("do", "apply"):
            return {}
        found = {}
        for item in self.probe(self.change.state.table.steps[0], asked):
            if not isinstance(item, Reported):  # nobody answers: seal looks again before the host itself is changed
                continue
            if why := fingerprint.moved(reviewed[item.host], fingerprint.of(item.report)):
                found[item.host] = {"why": f"not as reviewed: {'; '.join(why)}; left alone", "moved": list(why)}
        return found

    def _arguments(self, provider: Provider, step: Step, start: Start) -> dict[str, dict[str, Any]]:
        """What each host's role is given. A host whose evidence does not suffice is held; the others go on."""
        args: dict[str, dict[str, Any]] = {}
        for host in start.hosts:
            try:
                args[host] = provider.args(self.change.view(host, step, start.direction), start.tasks)
            except Exception as error:
                why = f"what {provider.role} needs is not in the journal ({type(error).__name__}: {error})"
                self._append([self._step_event(Kind.HELD, host, step, start.direction, data={"why": why})])
        return args

    def _new_attempt(self) -> str:
        self._attempts += 1
        return f"{self.change.id}/{self._fence}.{self._attempts}"

    def _artifacts(self) -> Path:
        return self.change.home / "artifacts"

    def _request(
        self,
        attempt: str,
        role: str,
        tasks: str,
        hosts: Sequence[str],
        args: dict[str, dict[str, Any]],
        step: dict[str, str],
    ) -> Request:
        frozen, plan = self.change.home / "frozen", self.change.plan
        owner = {
            "change": self.change.id,
            "controller": self._controller,
            "fence": self._fence,
            "boot": self._boot,
            "user": locking.user(),
            "reason": plan.reason,
            "ticket": plan.ticket,
        }
        return Request(
            attempt=attempt,
            playbook=frozen / "playbooks" / "phase.yml",
            role=role,
            tasks=tasks,
            hosts=tuple(hosts),
            inventory=tuple(str(frozen / path) for path in self.change.meta["inventory"]),
            host_args=args,
            shared={"gpuchange_owner": owner, "gpuchange_step": step},
            cmdline=self.connection.cmdline(),
            become_password=self.connection.become_password,
            forks=min(self.connection.forks, max(len(hosts), 1)),
            verbosity=self.connection.verbosity,
        )

    # -- evidence -----------------------------------------------------------------------------------------------------

    def _wait(self, wake_at: float | None) -> None:
        timeout = TICK if wake_at is None else min(TICK, max(0.0, wake_at - time.monotonic()))
        for key, _ in self._selector.select(timeout):
            if key.fileobj is self._wake_read:
                self._woken()
            elif key.fd in self.plays:  # an end is told twice while a process just forked holds the pipe too
                self._read(*self.plays[key.fd])

    def _woken(self) -> None:
        if b"h" in self._wake_read.recv(64):
            for play, _ in self.plays.values():
                play.stop()

    def _read(self, play: Play, start: Start) -> None:
        descriptor = play.fileno()
        entries = [self._outcome(play, start, item) for item in play.evidence()]
        if entries:
            self._append(entries)
        if play.ended:
            self._selector.unregister(descriptor)
            del self.plays[descriptor]

    def _outcome(self, play: Play, start: Start, evidence: Evidence) -> Event | tuple[Event, dict[str, Any]]:
        step = self.change.state.table.step(start.phase, start.provider)
        outcome = judge(self._situation(start, step, evidence.host), self._checked(evidence))
        event = self._step_event(
            outcome.kind,
            evidence.host,
            step,
            start.direction,
            attempt=play.request.attempt,
            data=outcome.data,
        )
        return event if outcome.body is None or self._repeats(outcome, event) else (event, outcome.body)

    def _repeats(self, outcome: Outcome, event: Event) -> bool:
        """Reports of waits are many and alike: the first of a step is kept, then only what decides."""
        known = self.change.bodies.get(event.host, {})
        return outcome.kind == Kind.AGAIN and (event.direction, f"{event.phase}/{event.provider}") in known

    def _situation(self, start: Start, step: Step, host: str) -> Situation:
        standing = self.change.state.hosts[host].steps[step.key]
        provider, _ = self.change.provider(step.play(start.direction).phase, start.provider)
        return Situation(
            provider=provider,
            view=self.change.view(host, step, start.direction),
            tasks=start.tasks,
            lost=standing.lost,
            lost_waited=standing.lost_waited,
            unreachable_limit=self.change.plan.rollout.unreachable_timeout,
            before_change=start.phase == self.change.state.table.steps[0].phase.name,
            was_silent=standing.silent,
            silence=standing.why,
            stopping=self.stopping,
            reviewed=self._reviewed(start, host),
        )

    def _reviewed(self, start: Start, host: str) -> Mapping[str, Any] | None:
        looks = start.direction == "do" and start.phase in STILL_AS_REVIEWED
        return self.change.reviewed.get(host) if looks else None

    def _checked(self, evidence: Evidence) -> Evidence:
        """Hosts are one machine-id, not a name: two names for one machine, or another machine under a name, fail."""
        if not isinstance(evidence, Reported) or evidence.where not in ("", evidence.host):
            return evidence
        machine = evidence.report.get("machine_id")
        if not machine:
            return evidence
        known = self.change.state.machines
        other = known.get(str(machine))
        if other is not None and other != evidence.host:
            return Failed(evidence.host, f"{other} and {evidence.host} are the same machine (machine-id {machine})")
        mine = next((m for m, host in known.items() if host == evidence.host), None)
        if mine is not None and mine != machine:
            why = f"another machine answers as {evidence.host}: machine-id {machine}, was {mine}"
            return Failed(evidence.host, why, refused={"kind": "identity", "by": {"machine_id": machine}})
        if mine is None:
            self._append([Event(Kind.NOTE, host=evidence.host, data={"machine_id": str(machine)})])
        return evidence

    # -- journal ------------------------------------------------------------------------------------------------------

    def _step_event(
        self,
        kind: Kind,
        host: str,
        step: Step,
        direction: str,
        *,
        attempt: str = "",
        data: dict[str, Any] | None = None,
    ) -> Event:
        return Event(kind, host, step.phase.name, step.provider, direction, attempt, data or {})

    def _append(self, entries: Sequence[Event | tuple[Event, dict[str, Any]]]) -> None:
        for event in self.change.journal.append(entries):
            self.change.fold(event, time.monotonic())
            tell(self.observers, event, self.change.state)


def _aimed(start: Start) -> str:
    """The direction in the role's own sense: release's do is drain's undo."""
    return "undo" if start.aim == "undo" else "do"
