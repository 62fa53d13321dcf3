"""What the engine gives to a play and takes from it: requests, arguments, identities, bodies, waits."""

from __future__ import annotations

import selectors
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuchange import engine as engines
from gpuchange import locking
from gpuchange.change import Change, Connection
from gpuchange.player import Request
from gpuchange.providers.contract import HostView, Mode
from gpuchange.reports import Evidence, Reported
from gpuchange.states import Event, Kind, Status
from tests.fakechange import crash_at, events, run, statuses
from tests.fleetfake import PROVIDERS, FakePlay, World

pytest_plugins = ["tests.fakechange"]


def requests(world: World, role: str, tasks: str = "apply") -> list[Request]:
    return [request for request in world.requests if (request.role, request.tasks) == (role, tasks)]


def with_args(monkeypatch: pytest.MonkeyPatch, phase: str, args: Callable[[HostView, Mode], dict[str, Any]]) -> None:
    """Give the fake provider of a phase arguments to build."""
    changed = tuple(replace(row, args=args) if row.phase == phase else row for row in PROVIDERS)
    monkeypatch.setattr("gpuchange.providers.PROVIDERS", changed)


# -- requests ---------------------------------------------------------------------------------------------------------


def test_a_play_is_told_who_asks_for_what_and_where(begin: Callable[..., Path]) -> None:
    home, world = begin(2), World()
    connection = Connection(user="ops", become_password="secret", forks=7, verbosity=2)
    assert run(home, world, connection) == 0
    frozen, first = home / "frozen", world.requests[0]
    controller = next(event for event in events(home) if event.kind is Kind.CONTROLLER)
    assert first.shared == {
        "gpuchange_owner": {
            "change": home.name,
            "controller": controller.data["id"],
            "fence": 1,
            "boot": locking.boot(),
            "user": locking.user(),
            "reason": "because",
            "ticket": "OPS-7",
        },
        "gpuchange_step": {"phase": "preflight", "provider": "host", "direction": "do"},
    }
    assert (first.role, first.tasks, first.hosts) == ("preflight_host", "apply", ("h1", "h2"))
    assert first.host_args == {"h1": {}, "h2": {}}
    assert first.playbook == frozen / "playbooks" / "phase.yml" and first.playbook.is_file()
    assert first.inventory and all(Path(path).exists() and path.startswith(str(frozen)) for path in first.inventory)
    assert (first.cmdline, first.become_password, first.verbosity) == ("--user ops", "secret", 2)


def test_a_play_forks_for_its_hosts_and_no_wider_than_allowed(begin: Callable[..., Path]) -> None:
    for forks, expected in ((1, 1), (2, 2), (50, 3)):
        home, world = begin(3), World()
        run(home, world, Connection(forks=forks), last_phase="preflight")
        assert [request.forks for request in requests(world, "preflight_host")] == [expected]


def test_logs_of_plays_lie_with_the_change(begin: Callable[..., Path]) -> None:
    home, world, logs = begin(), World(), []

    def player(request: Request, log: Path) -> FakePlay:
        logs.append(log)
        return FakePlay(world, request)

    engine = engines.Engine(home, Connection(), player=player)  # type: ignore[arg-type]
    engine.run()
    engine.close()
    assert set(logs) == {home / "artifacts"} and len(logs) > 7


def test_bringing_back_plays_the_undo_of_taking_out_and_says_so(begin: Callable[..., Path]) -> None:
    world = World(faults={("h1", "drain_gpu_users", "undo"): ["silent"]})
    assert run(begin(), world) == 0
    [undo] = requests(world, "drain_gpu_users", "undo")
    assert undo.shared["gpuchange_step"] == {"phase": "release", "provider": "gpu_users", "direction": "undo"}
    [probe] = requests(world, "drain_gpu_users", "probe")
    assert probe.shared["gpuchange_step"] == {"phase": "release", "provider": "gpu_users", "direction": "undo"}


def test_going_back_plays_undo_and_asks_for_undo(begin: Callable[..., Path]) -> None:
    faults = {("h1", "verify_host", "apply"): ["failed"], ("h1", "seal_host", "undo"): ["silent"]}
    home, world = begin(), World(faults=faults)
    assert run(home, world) == 3
    for tasks in ("undo", "probe"):
        [request] = requests(world, "seal_host", tasks)
        assert request.shared["gpuchange_step"] == {"phase": "seal", "provider": "host", "direction": "undo"}
    kinds = [event.kind for event in events(home) if (event.phase, event.direction) == ("seal", "undo")]
    assert kinds == [Kind.STARTED, Kind.LOST, Kind.PROBING, Kind.ACCEPTED]


# -- arguments --------------------------------------------------------------------------------------------------------


def test_a_host_whose_arguments_cannot_be_made_is_held_and_the_others_go_on(
    begin: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def args(view: HostView, mode: Mode) -> dict[str, Any]:
        return {"mode": mode, "found": view.last["record/host"]["found"][view.host]}

    with_args(monkeypatch, "seal", args)
    home, world = begin(2), World(reports={"record_host": {"found": {"h2": 5}}})
    assert run(home, world) == 5
    assert statuses(home)["seal/host"] is Status.HELD
    [held] = [event for event in events(home) if event.kind is Kind.HELD]
    assert (held.host, held.phase, held.provider, held.direction) == ("h1", "seal", "host", "do")
    assert held.data["why"] == "what seal_host needs is not in the journal (KeyError: 'h1')"
    assert not requests(world, "seal_host")


def test_arguments_are_each_hosts_own(begin: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with_args(
        monkeypatch, "record", lambda view, mode: {"mode": mode, "of": view.host} if view.host != "h2" else {}["x"]
    )
    home, world = begin(3), World()
    run(home, world)
    [request] = requests(world, "record_host")
    assert request.hosts == ("h1", "h3")
    assert request.host_args == {host: {"mode": "apply", "of": host} for host in ("h1", "h3")}
    assert statuses(home, "h2")["record/host"] is Status.HELD


# -- evidence ---------------------------------------------------------------------------------------------------------


def test_a_machine_is_noted_once_for_each_host(begin: Callable[..., Path]) -> None:
    home = begin(2)
    assert run(home, World()) == 0
    noted = [(event.host, event.data["machine_id"]) for event in events(home) if "machine_id" in event.data]
    assert noted == [("h1", "id-h1"), ("h2", "id-h2")]


@pytest.mark.parametrize("report", [{"machine_id": ""}, {"machine_id": None}])
def test_a_report_without_a_machine_says_nothing_about_it(begin: Callable[..., Path], report: dict[str, Any]) -> None:
    home = begin(2)
    assert run(home, World(reports={"preflight_host": report})) == 0
    noted = [(event.host, event.phase) for event in events(home) if "machine_id" in event.data]
    assert len(noted) == 2


def test_a_delegate_speaks_for_a_host_but_is_not_that_machine(begin: Callable[..., Path]) -> None:
    """One load balancer answers for all hosts with its own machine-id."""
    home, world = begin(2), World(reports={"drain_gpu_users": {"machine_id": "the-balancer"}})

    def answer(request: Request, host: str) -> Evidence:
        said = World.answer(world, request, host)
        if request.role == "drain_gpu_users" and isinstance(said, Reported):
            return replace(said, where="balancer")
        return replace(said, where="") if isinstance(said, Reported) else said

    world.answer = answer  # type: ignore[method-assign]
    assert run(home, world) == 0
    noted = [event.data["machine_id"] for event in events(home) if "machine_id" in event.data]
    assert noted == ["id-h1", "id-h2"]


def test_another_machine_is_named_with_what_it_was_before(begin: Callable[..., Path]) -> None:
    home, world = begin(), World(reports={"verify_host": {"machine_id": "other"}})
    assert run(home, world) == 5
    [held] = [event for event in events(home) if event.kind is Kind.HELD]
    assert held.data["why"] == "another machine answers as h1: machine-id other, was id-h1"
    assert held.data["refused"] == {"kind": "identity", "by": {"machine_id": "other"}}


def test_an_outcome_carries_the_attempt_of_its_intent_and_its_report(begin: Callable[..., Path]) -> None:
    home, world = begin(), World(reports={"record_host": {"driver": "550"}})
    assert run(home, world) == 0
    intent, outcome = [event for event in events(home) if event.phase == "record"]
    assert intent.attempt == outcome.attempt == requests(world, "record_host")[0].attempt
    assert (intent.body, outcome.provider, outcome.direction) == ("", "host", "do")
    change = Change.open(home, readonly=True)
    assert change.journal.body(outcome.body)["driver"] == "550"
    change.journal.close()


def test_of_many_alike_reports_of_a_wait_the_first_is_kept(
    begin: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpuchange.reports import Verdict

    monkeypatch.setattr("gpuchange.reports.Verdict.again", lambda _after, why: Verdict("again", why, after=0.01))
    home = begin()
    world = World(faults={("h1", "verify_host", "apply"): ["running"] * 3, ("h1", "record_host", "apply"): ["running"]})
    assert run(home, world) == 0
    bodies = [bool(event.body) for event in events(home) if event.phase == "verify" and event.kind is not Kind.STARTED]
    assert bodies == [True, False, False, True]
    assert [bool(event.body) for event in events(home) if event.phase == "record"] == [False, True, False, True]


class Stuttering(FakePlay):
    """Is readable before it has anything to say."""

    looks = 0

    def evidence(self) -> Iterator[Evidence]:
        self.looks += 1
        if self.looks > 2:
            yield from super().evidence()


def test_a_play_that_says_nothing_yet_is_read_again_and_writes_nothing(begin: Callable[..., Path]) -> None:
    calm_home, home, world = begin(), begin(), World()
    assert run(calm_home, World()) == 0
    engine = engines.Engine(home, Connection(), player=lambda request, _log: Stuttering(world, request))
    assert engine.run() == 0
    assert engine.plays == {}
    engine.close()
    assert [(e.kind, e.phase) for e in events(home)] == [(e.kind, e.phase) for e in events(calm_home)]


def test_a_play_whose_end_is_told_twice_is_read_once(
    begin: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Twice(selectors.DefaultSelector):  # as epoll does while a process just forked holds the closed pipe too
        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            return super().select(timeout) * 2

    monkeypatch.setattr(engines.selectors, "DefaultSelector", Twice)
    assert run(begin(), World()) == 0


def test_the_wait_for_a_silent_host_counts_what_was_waited_before(
    begin: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`lost` and `lost_waited` reach the judge: pauses grow, and end at the plan's limit (1 s here)."""
    monkeypatch.setattr("gpuchange.judging.FIRST_BACKOFF", 0.2)
    faults = {("h1", "seal_host", "apply"): ["unreachable"], ("h1", "seal_host", "probe"): ["unreachable"] * 9}
    home = begin()
    assert run(home, World(faults=faults)) == 5
    lost = [event.data for event in events(home) if event.kind is Kind.LOST]
    assert [data["after"] for data in lost] == [0.2, 0.4, 0.8]
    assert [round(data["waited"], 1) for data in lost] == [0.2, 0.6, 1.4]


def test_a_play_that_failed_silently_twice_says_so_when_nothing_was_done(begin: Callable[..., Path]) -> None:
    """The probe after a silence rejects with the silence's own words."""
    home, world = begin(), World(faults={("h1", "seal_host", "apply"): ["silent"]})
    world._act, acts = (lambda request, host: None if request.role == "seal_host" else acts(request, host)), world._act
    assert run(home, world) == 3
    [rejected] = [event for event in events(home) if event.kind is Kind.REJECTED]
    assert rejected.data["why"] == "no word; a look shows that it was not done"


def test_silence_in_preflight_ends_the_change_before_it_began(begin: Callable[..., Path]) -> None:
    home, world = begin(2), World(faults={("h2", "preflight_host", "apply"): ["silent"]})
    assert run(home, world) == 1
    assert not [event for event in events(home) if event.kind is Kind.LOST]
    home, world = begin(2), World(faults={("h2", "record_host", "apply"): ["silent"]})
    assert run(home, world) == 0


def test_an_undo_that_was_under_way_is_lost_as_an_undo(begin: Callable[..., Path]) -> None:
    home, world = begin(), World(faults={("h1", "verify_host", "apply"): ["failed"]})
    crash_at(home, world, lambda event: (event.kind, event.phase) == (Kind.TURNED, ""))
    turned = [event for event in events(home) if event.kind is Kind.TURNED]
    assert [(event.host, event.data) for event in turned] == [("h1", {"why": "it broke"})]
    assert run(home, world) == 3


def test_events_keep_their_order_in_one_transaction(begin: Callable[..., Path]) -> None:
    """All intents of one play come before any of its outcomes, so that a crash between leaves no host unaccounted."""
    home = begin(3)
    assert run(home, World()) == 0

    def of_preflight(event: Event) -> bool:
        return event.phase == "preflight"

    kinds = [event.kind for event in filter(of_preflight, events(home))]
    assert kinds == [Kind.STARTED] * 3 + [Kind.ACCEPTED] * 3
