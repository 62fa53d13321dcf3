"""Stop, stop hard, pause, take over, give back: who steers the engine, and what it writes about itself."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuchange import engine as engines
from gpuchange import orders
from gpuchange.change import Connection
from gpuchange.engine import Engine
from gpuchange.errors import LockedError
from gpuchange.player import Request
from gpuchange.reports import Evidence, Reported, Silent
from gpuchange.states import Event, Kind, Status
from tests.fakechange import acted, crash_at, events, run, statuses
from tests.fleetfake import FakePlay, World

pytest_plugins = ["tests.fakechange"]


class SlowPlay(FakePlay):
    """Says what its first host did, and nothing about the others until it is stopped (or told to `finish`)."""

    def __init__(self, world: World, request: Request) -> None:
        super().__init__(world, request)
        self._ends, self._told = os.pipe()
        self._rest = list(request.hosts)
        self.stopped = False
        self.looks = 0
        os.write(self._told, b"first")

    def fileno(self) -> int:
        return self._ends

    def evidence(self) -> Iterator[Evidence]:
        self.looks += 1
        if os.read(self._ends, 64) == b"first":
            yield self.world.answer(self.request, self._rest.pop(0))
            return
        for host in self._rest:
            yield Silent(host, "ended", stopped=True) if self.stopped else self.world.answer(self.request, host)
        self.ended = True

    def finish(self) -> None:
        os.write(self._told, b"end")

    def stop(self) -> None:
        self.stopped = True
        self.finish()


class Slow:
    """A player whose plays of one role are slow."""

    def __init__(self, world: World, role: str) -> None:
        self.world, self.role, self.plays = world, role, []

    def __call__(self, request: Request, log: Path) -> FakePlay:
        if request.role != self.role or request.tasks != "apply":
            return self.world.play(request, log)
        self.plays.append(SlowPlay(self.world, request))
        return self.plays[-1]


def played(engine: Engine, **more: Any) -> int:
    try:
        return engine.run(**more)
    finally:
        engine.close()


def of_kind(home: Path, kind: Kind) -> list[Event]:
    return [event for event in events(home) if event.kind is kind]


def when(phase: str, kind: Kind, act: Callable[[], object]) -> Callable[[Event, Any], None]:
    """An observer that acts at the first such event."""
    done: list[Event] = []

    def observer(event: Event, _state: Any) -> None:
        if (event.phase, event.kind) == (phase, kind) and not done:
            done.append(event)
            act()

    return observer


# -- stop -------------------------------------------------------------------------------------------------------------


def test_a_stop_lets_what_is_in_flight_end_and_starts_nothing_new(begin: Callable[..., Path]) -> None:
    home, world = begin(2), World()
    slow = Slow(world, "preflight_host")
    engine = Engine(home, Connection(), player=slow)

    def stop() -> None:
        engine.stop()
        slow.plays[0].finish()

    engine.observers.append(when("preflight", Kind.ACCEPTED, stop))
    assert played(engine) == 5
    assert not slow.plays[0].stopped
    assert [statuses(home, host)["preflight/host"] for host in ("h1", "h2")] == [Status.DONE, Status.DONE]
    assert {event.phase for event in of_kind(home, Kind.STARTED)} == {"preflight"}


def test_a_hard_stop_ends_the_plays_and_the_next_controller_looks_at_what_they_left(
    begin: Callable[..., Path],
) -> None:
    home, world = begin(2), World()
    slow = Slow(world, "preflight_host")
    engine = Engine(home, Connection(), player=slow)
    engine.observers.append(when("preflight", Kind.ACCEPTED, lambda: engine.stop(hard=True)))
    assert played(engine) == 5
    assert slow.plays[0].stopped and len(slow.plays) == 1
    assert [statuses(home, host)["preflight/host"] for host in ("h1", "h2")] == [Status.DONE, Status.UNSURE]
    assert run(home, world) == 0
    assert [event.kind for event in events(home) if (event.host, event.phase) == ("h2", "preflight")] == [
        *(Kind.STARTED, Kind.LOST, Kind.PROBING, Kind.NOT_DONE, Kind.STARTED, Kind.ACCEPTED)
    ]


def test_an_engine_that_has_ended_holds_no_file_open(begin: Callable[..., Path]) -> None:
    home = begin()
    gc.collect()  # what other tests have dropped
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        engine = Engine(home, Connection(), player=World().play)
        engine.run()
        engine.close()
        assert len(os.listdir("/proc/self/fd")) <= before


def test_a_stop_wakes_an_engine_that_waits(begin: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "TICK", 60.0)
    home, world = begin(), World()
    slow = Slow(world, "nobody")
    engine = Engine(home, Connection(), player=slow)
    world.faults = {("h1", "drain_gpu_users", "apply"): ["running"]}
    monkeypatch.setattr("gpuchange.reports.Verdict.again", lambda _after, why: _again(60.0, why))
    engine.observers.append(when("drain", Kind.AGAIN, engine.stop))
    began = time.monotonic()
    assert played(engine) == 5
    assert time.monotonic() - began < 30
    assert statuses(home)["drain/gpu_users"] == Status.WAITING


def _again(after: float, why: str) -> Any:
    from gpuchange.reports import Verdict

    return Verdict("again", why, after=after)


def test_a_wait_is_waited_out_and_not_longer(begin: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "TICK", 60.0)
    monkeypatch.setattr("gpuchange.reports.Verdict.again", lambda _after, why: _again(0.4, why))
    home, moments = begin(), []
    world = World(faults={("h1", "drain_gpu_users", "apply"): ["running"]})

    def observer(event: Event, _state: Any) -> None:
        if event.phase == "drain":
            moments.append(time.monotonic())

    assert run(home, world, observers=[observer]) == 0
    begun, again, begun_again, _done = moments
    assert 0.39 <= begun_again - again < 30 and again >= begun


# -- one engine, several runs; phases ---------------------------------------------------------------------------------


def test_an_engine_may_run_on_after_a_phase_and_takes_over_once(begin: Callable[..., Path]) -> None:
    home, world = begin(2), World()
    engine = Engine(home, Connection(), player=world.play)
    assert engine.run(last_phase="preflight") == 5
    assert {event.phase for event in engine.change.journal.events() if event.phase} == {"preflight"}
    assert played(engine) == 0
    assert len(of_kind(home, Kind.CONTROLLER)) == 1


def test_observers_are_told_every_event_in_order_with_the_state_after_it(begin: Callable[..., Path]) -> None:
    home, heard, seen = begin(), [], set()

    def observer(event: Event, state: Any) -> None:
        heard.append(event.seq)
        if event.kind is Kind.STARTED:
            seen.add(state.hosts["h1"].steps[event.phase, event.provider].status)

    assert run(home, World(), observers=[observer]) == 0
    assert heard == [event.seq for event in events(home)][1:]  # the first was there before
    assert seen == {Status.DOING}


def test_an_observer_that_fails_stops_nothing_and_is_told_of(
    begin: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    def observer(_event: Event, _state: Any) -> None:
        raise OSError("the terminal has gone")

    assert run(begin(), World(), observers=[observer]) == 0
    assert "could not be shown: the terminal has gone" in caplog.text


def test_what_others_learned_is_written_by_who_has_the_journal_open(begin: Callable[..., Path]) -> None:
    home, heard = begin(), []
    engine = Engine(home, Connection(), [lambda event, _state: heard.append(event.data)], player=World().play)
    engine.note(Event(Kind.NOTE, "h1", data={"machine_id": "m"}))
    assert engine.change.state.machines == {"m": "h1"} and heard == [{"machine_id": "m"}]
    engine.close()
    assert [event.data for event in of_kind(home, Kind.NOTE)] == [{"machine_id": "m"}]


def test_only_one_engine_has_a_change(begin: Callable[..., Path]) -> None:
    home, world = begin(), World()
    engine = Engine(home, Connection(), player=world.play)
    with pytest.raises(LockedError):
        Engine(home, Connection(), player=world.play)
    engine.close()
    assert run(home, world) == 0


# -- pause ------------------------------------------------------------------------------------------------------------


def test_an_old_pause_does_not_stop_who_resumes(begin: Callable[..., Path]) -> None:
    home = begin()
    orders.pause(home)
    assert run(home, World()) == 0
    assert not (home / "pause").exists()


# -- what a controller writes about itself ----------------------------------------------------------------------------


def test_a_controller_says_who_it_is_and_its_fence_grows(begin: Callable[..., Path]) -> None:
    home, world = begin(), World()
    assert (run(home, world, last_phase="preflight"), run(home, world, last_phase="drain"), run(home, world)) == (
        5,
        5,
        0,
    )
    told = [event.data for event in of_kind(home, Kind.CONTROLLER)]
    assert [data["fence"] for data in told] == [1, 2, 3]
    assert len({data["id"] for data in told}) == 3
    for data in told:
        assert data["pid"] == os.getpid() and data["orphans"] == 0
        assert data["boot"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        assert data["id"].startswith(f"{os.uname().nodename}:{os.getpid()}:")
    assert [event.data["code"] for event in of_kind(home, Kind.ENDED)] == [5, 5, 0]
    assert events(home)[-1].kind is Kind.ENDED


def test_attempts_are_never_named_twice_and_name_change_and_fence(begin: Callable[..., Path]) -> None:
    home, world = begin(2), World()
    run(home, world, last_phase="drain")
    run(home, world)
    names = [request.attempt for request in world.requests]
    assert len(set(names)) == len(names)
    first = [event for event in events(home) if event.attempt]
    fences = [1 if event.seq < of_kind(home, Kind.CONTROLLER)[1].seq else 2 for event in first]
    assert [event.attempt.rpartition(".")[0] for event in first] == [f"{home.name}/{fence}" for fence in fences]
    numbers = [int(name.rpartition(".")[2]) for name in names if "/1." in name]
    assert numbers == list(range(1, len(numbers) + 1))
    marked = [event for event in first if event.kind in (Kind.ACCEPTED, Kind.STARTED)]
    assert len({event.attempt for event in marked}) * 2 <= len(marked)  # an outcome names the attempt of its intent


def test_what_was_in_flight_is_lost_with_its_controller_either_way(begin: Callable[..., Path]) -> None:
    faults = {("h1", "verify_host", "apply"): ["failed"]}
    for direction, phase in (("do", "seal"), ("undo", "seal")):
        home, world = begin(), World(faults={key: list(value) for key, value in faults.items()})
        crash_at(home, world, lambda event, way=direction, of=phase: (event.direction, event.phase) == (way, of))
        run(home, world)
        [lost] = of_kind(home, Kind.LOST)
        assert (lost.host, lost.phase, lost.provider, lost.direction) == ("h1", phase, "host", direction)
        assert lost.data == {"why": "the controller ended", "after": 0.0} and lost.attempt == ""
        following = [e.kind for e in events(home) if e.seq > lost.seq and (e.phase, e.direction) == (phase, direction)]
        assert following[0] is Kind.PROBING


def test_a_resume_says_why_it_takes_up_what_had_failed(begin: Callable[..., Path]) -> None:
    home, world = begin(2), World(faults={("h2", "preflight_host", "apply"): ["failed"]})
    assert (run(home, world), run(home, world)) == (1, 0)
    [retry] = of_kind(home, Kind.RETRY)
    assert (retry.host, retry.phase, retry.direction, retry.data) == ("h2", "preflight", "do", {"why": "resumed"})


# -- owner markers ----------------------------------------------------------------------------------------------------


def marked(world: World) -> list[tuple[str, ...]]:
    return [request.hosts for request in world.requests if request.role == "owner_marker"]


def test_markers_of_hosts_that_are_done_are_given_back_once(begin: Callable[..., Path]) -> None:
    home, world = begin(2), World()
    assert run(home, world) == 0
    assert marked(world) == [("h1", "h2")]
    [request] = [request for request in world.requests if request.role == "owner_marker"]
    assert (request.tasks, request.host_args, request.shared["gpuchange_step"]) == ("apply", {"h1": {}, "h2": {}}, {})
    assert {event.host for event in events(home) if event.data.get("unmarked")} == {"h1", "h2"}
    assert run(home, world) == 0
    assert len(marked(world)) == 1


def test_no_marker_is_asked_back_that_was_never_left_or_is_still_needed(begin: Callable[..., Path]) -> None:
    home, world = begin(2), World()
    run(home, world, last_phase="preflight")
    assert marked(world) == []
    run(home, world, last_phase="drain")  # one host is out now, the other has nothing to give back
    assert marked(world) in ([], [("h2",)])


def test_a_marker_that_could_not_be_given_back_is_asked_for_again(begin: Callable[..., Path]) -> None:
    home, world = begin(2), World(faults={("h2", engines.OWNER_ROLE, "apply"): ["unreachable"]})
    assert run(home, world) == 0
    assert [event.host for event in events(home) if event.data.get("unmarked")] == ["h1"]
    assert run(home, world) == 0
    assert marked(world) == [("h1", "h2"), ("h2",)]


def test_closing_without_running_touches_no_host(begin: Callable[..., Path]) -> None:
    home, world = begin(), World(faults={("h1", engines.OWNER_ROLE, "apply"): ["unreachable"]})
    assert run(home, world) == 0
    Engine(home, Connection(), player=world.play).close()
    assert len(marked(world)) == 1


# -- looking without a change -----------------------------------------------------------------------------------------


def test_a_probe_asks_each_host_and_leaves_no_trace_in_the_journal(begin: Callable[..., Path]) -> None:
    home, world = begin(2), World(done={("h1", "seal_host")})
    engine = Engine(home, Connection(), player=Slow(world, "seal_host"))
    before = engine.change.journal.head()
    found = engine.probe(engine.change.state.table.step("seal", "host"), ["h1", "h2"])
    assert [(item.host, item.report["state"]) for item in found if isinstance(item, Reported)] == [
        ("h1", "done"),
        ("h2", "not_done"),
    ]
    assert engine.change.journal.head() == before
    [request] = world.requests
    assert (request.role, request.tasks, request.hosts) == ("seal_host", "probe", ("h1", "h2"))
    assert request.host_args == {"h1": {}, "h2": {}}
    assert request.shared["gpuchange_step"] == {"phase": "seal", "provider": "host", "direction": "do"}
    engine.close()


def test_a_slow_play_of_markers_is_read_to_its_end(begin: Callable[..., Path]) -> None:
    home, world = begin(2), World()
    slow = Slow(world, engines.OWNER_ROLE)
    engine = Engine(home, Connection(), player=slow)

    def note(event: Event, _state: Any) -> None:
        if event.data.get("unmarked"):
            heard.append(event.host)

    heard: list[str] = []
    engine.observers.append(note)
    engine.run()
    finishing = World.answer

    def answer(request: Request, host: str) -> Evidence:
        if request.role == engines.OWNER_ROLE and host == "h1":
            slow.plays[0].finish()
        return finishing(world, request, host)

    world.answer = answer  # type: ignore[method-assign]
    engine.close()
    assert heard == ["h1", "h2"] and slow.plays[0].looks == 2


def test_a_failed_host_is_reported_while_its_neighbours_play_goes_on(begin: Callable[..., Path]) -> None:
    home, world = begin(3), World()
    slow = Slow(world, "preflight_host")
    engine = Engine(home, Connection(), player=slow)
    engine.observers.append(when("preflight", Kind.ACCEPTED, lambda: slow.plays[0].finish()))
    assert played(engine) == 0
    accepted = [event.host for event in of_kind(home, Kind.ACCEPTED) if event.phase == "preflight"]
    assert accepted == ["h1", "h2", "h3"] and acted(world, "h3")
