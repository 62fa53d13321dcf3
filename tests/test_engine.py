"""The engine against fake hosts: forward, failure and rollback, waits, lost hosts, holds, crashes at every moment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuchange import engine as engines
from gpuchange import orders
from gpuchange.change import Connection
from gpuchange.errors import NeedsOperator, UsageError
from gpuchange.player import Request
from gpuchange.reports import Evidence, Silent
from gpuchange.states import Event, Kind, Status
from tests.fakechange import acted, crash_at, events, run, statuses
from tests.fleetfake import World

pytest_plugins = ["tests.fakechange"]


def test_forward_does_every_step_once_in_order(begin: Callable[..., Path]) -> None:
    home, world = begin(2), World()
    assert run(home, world) == 0
    assert set(statuses(home).values()) == {Status.DONE}
    roles = acted(world)
    assert roles.index("drain_gpu_users.apply") < roles.index("seal_host.apply") < roles.index("drain_gpu_users.undo")
    assert len(roles) == len(set(roles))


def test_an_intent_is_durable_before_its_play_starts(begin: Callable[..., Path]) -> None:
    home, world = begin(), World()

    def player(request: Any, log: Path) -> Any:
        if request.role != engines.OWNER_ROLE:
            last = events(home)[-1]
            assert last.kind in (Kind.STARTED, Kind.PROBING) and last.attempt == request.attempt
        return World.play(world, request, log)

    world.play = player  # type: ignore[method-assign]
    assert run(home, world) == 0


def test_a_failed_step_is_undone_with_everything_before_it(begin: Callable[..., Path]) -> None:
    home, world = begin(), World(faults={("h1", "verify_host", "apply"): ["failed"]})
    assert run(home, world) == 3
    assert ("h1", "drain_gpu_users") not in world.done
    found = statuses(home)
    assert found["drain/gpu_users"] == Status.UNDONE and found["seal/host"] == Status.UNDONE
    assert found["watch/host"] == Status.PENDING


def test_no_further_host_starts_after_a_failure(begin: Callable[..., Path]) -> None:
    home, world = begin(2), World(faults={("h1", "verify_host", "apply"): ["failed"]})
    assert run(home, world) == 3
    assert "drain_gpu_users.apply" not in acted(world, "h2")


def test_a_failed_undo_is_exit_6(begin: Callable[..., Path]) -> None:
    faults = {("h1", "verify_host", "apply"): ["failed"], ("h1", "seal_host", "undo"): ["failed"]}
    home, world = begin(), World(faults=faults)
    assert run(home, world) == 6
    assert ("h1", "drain_gpu_users") in world.done  # stays drained


def test_unreachable_before_any_change_is_exit_4(begin: Callable[..., Path]) -> None:
    home, world = begin(2), World(faults={("h2", "preflight_host", "apply"): ["unreachable"]})
    assert run(home, world) == 4
    assert "drain_gpu_users.apply" not in acted(world)


@pytest.mark.case("noise-in-front-of-json", "worker-killed-by-oom", "unreachable-counted-as-success")
def test_lost_in_the_middle_is_probed_and_adopted(begin: Callable[..., Path]) -> None:
    home, world = begin(), World(faults={("h1", "drain_gpu_users", "apply"): ["silent"]})
    assert run(home, world) == 0
    kinds = [event.kind for event in events(home) if (event.phase, event.direction) == ("drain", "do")]
    assert kinds == [Kind.STARTED, Kind.LOST, Kind.PROBING, Kind.ACCEPTED]
    assert acted(world).count("drain_gpu_users.apply") == 1


def test_a_play_ended_because_the_controller_was_told_to_stop_is_played_again(begin: Callable[..., Path]) -> None:
    """Not a failure of the host: a resume must not take the change back."""
    home, world = begin(), World()
    engine = engines.Engine(home, Connection(), player=world.play)  # type: ignore[arg-type]

    def answer(request: Request, host: str) -> Evidence:
        if request.role == "verify_host" and not engine.stopping:
            engine.stop(hard=True)
            return Silent(host, "the play's process ended")
        return World.answer(world, request, host)

    world.answer = answer  # type: ignore[method-assign]
    engine.run()
    engine.close()
    assert statuses(home)["verify/host"] == Status.UNSURE
    assert run(home, world) == 0
    kinds = [event.kind for event in events(home) if event.phase == "verify"]
    assert kinds == [Kind.STARTED, Kind.LOST, Kind.PROBING, Kind.NOT_DONE, Kind.STARTED, Kind.ACCEPTED]


@pytest.mark.case("unreachable-counted-as-success")
def test_a_host_that_does_not_come_back_is_held(begin: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuchange.judging.FIRST_BACKOFF", 0.01)
    monkeypatch.setattr("gpuchange.judging.LONGEST_BACKOFF", 0.01)
    faults = {
        ("h1", "drain_gpu_users", "apply"): ["unreachable"],
        ("h1", "drain_gpu_users", "probe"): ["unreachable"] * 9999,
    }
    home, world = begin(), World(faults=faults)
    assert run(home, world) == 5
    assert statuses(home)["drain/gpu_users"] == Status.HELD


def test_a_resume_takes_up_what_was_held_because_nobody_answered(
    begin: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuchange.judging.FIRST_BACKOFF", 0.3)
    monkeypatch.setattr("gpuchange.judging.LONGEST_BACKOFF", 0.3)
    gone = {"apply": ["unreachable"], "probe": ["unreachable"] * 9}
    home, world = begin(), World(faults={("h1", "verify_host", tasks): list(faults) for tasks, faults in gone.items()})
    assert run(home, world) == 5
    world.faults.clear()
    assert run(home, world) == 0 and acted(world).count("drain_gpu_users.apply") == 1


def test_a_resume_tries_again_what_failed_before_any_change(begin: Callable[..., Path]) -> None:
    home, world = begin(2), World(faults={("h2", "preflight_host", "apply"): ["unreachable"]})
    assert (run(home, world), run(home, world)) == (4, 0)


def test_again_comes_back_to_the_same_step(begin: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "gpuchange.reports.Verdict.again",
        lambda _after, why: __import__("gpuchange.reports").reports.Verdict("again", why, after=0.01),
    )
    home, world = begin(), World(faults={("h1", "verify_host", "apply"): ["running", "running"]})
    assert run(home, world) == 0
    kinds = [event.kind for event in events(home) if event.phase == "verify"]
    assert kinds.count(Kind.AGAIN) == 2 and kinds[-1] == Kind.ACCEPTED


@pytest.mark.thorough
def test_killed_at_every_event_then_resumed_ends_as_if_nothing_had_happened(begin: Callable[..., Path]) -> None:
    calm_home, calm = begin(2), World()
    assert run(calm_home, calm) == 0
    total = len(events(calm_home))
    for point in range(2, total):
        home, world = begin(2), World()
        crash_at(home, world, lambda event, at=point: event.seq >= at)
        assert run(home, world) == 0, point
        assert sorted(world.ledger) == sorted(calm.ledger), point
        assert world.done == calm.done, point


@pytest.mark.thorough
def test_crash_in_the_middle_of_a_rollback(begin: Callable[..., Path]) -> None:
    faults = lambda: {("h1", "verify_host", "apply"): ["failed"]}  # noqa: E731
    calm_home, calm = begin(), World(faults=faults())
    assert run(calm_home, calm) == 3
    for point in range(2, len(events(calm_home))):
        home, world = begin(), World(faults=faults())
        crash_at(home, world, lambda event, at=point: event.seq >= at)
        assert run(home, world) == 3, point
        assert world.done == calm.done, point
        assert len(world.ledger) == len(set(world.ledger)), point


def test_rollback_after_success(begin: Callable[..., Path]) -> None:
    home, world = begin(2), World()
    assert run(home, world) == 0
    assert orders.rollback(home, None) == ["h1", "h2"]
    assert run(home, world) == 0  # ordered, not failed
    assert set(statuses(home).values()) <= {Status.UNDONE, Status.DONE}
    assert not [key for key in world.done if key[1].startswith("drain")]


@pytest.mark.parametrize("moment", ["preflight", "drain"])
def test_a_rollback_never_begins_with_a_host(begin: Callable[..., Path], moment: str) -> None:
    """What is taken back early must not be carried forward by the run that takes it back."""
    home, world = begin(2), World()
    point = next(e.seq for e in _calm(begin) if (e.phase, e.kind) == (moment, Kind.STARTED))
    crash_at(home, world, lambda event: event.seq >= point)
    orders.rollback(home, None)
    assert run(home, world) == 0
    assert not [role for role in acted(world) + acted(world, "h2") if role.startswith("drain")]
    assert run(home, world) == 0 and orders.rollback(home, None) == []


def test_a_rollback_from_every_moment_goes_back_only(begin: Callable[..., Path]) -> None:
    for point in range(2, len(_calm(begin))):
        home, world = begin(2), World()
        crash_at(home, world, lambda event, at=point: event.seq >= at)
        before = len(world.ledger)
        orders.rollback(home, None)
        assert run(home, world, only_back=True) == 0, point
        forward = [key for key in world.ledger[before:] if key[2] == "apply"]
        assert not [key for key in forward if not key[1].startswith(("drain", "owner"))], (point, forward)
        assert not [key for key in world.done if key[1].startswith(("drain", "stack"))], point


def test_a_rollback_of_one_host_leaves_the_others_where_they_stand(begin: Callable[..., Path]) -> None:
    home, world = begin(3), World(faults={("h2", "backup_packages", "apply"): ["failed"]})
    run(home, world)
    before = len(world.ledger)
    assert orders.rollback(home, ["h1"]) == ["h1"]
    run(home, world, only_back=True)
    assert {key[0] for key in world.ledger[before:]} == {"h1"}
    assert not [key for key in world.done if key[0] == "h1" and key[1].startswith(("drain", "stack"))]


def _calm(begin: Callable[..., Path]) -> list[Event]:
    home = begin(2)
    assert run(home, World()) == 0
    return events(home)


def test_an_answer_given_twice_answers_no_other_step(begin: Callable[..., Path]) -> None:
    """A killed `resolve` may have been heard. The failure that turned the host back is no question any more."""
    home = begin()
    world = World(faults={("h1", "verify_host", "apply"): ["failed"], ("h1", "seal_host", "undo"): ["failed"]})
    assert run(home, world) == 6
    orders.resolve(home, "h1", "done")
    with pytest.raises(NeedsOperator, match="not held"):
        orders.resolve(home, "h1", "done")
    assert run(home, world) == 3
    assert statuses(home)["verify/host"] == Status.FAILED


def test_resolve_retry_done_undo_leave(begin: Callable[..., Path]) -> None:
    faults = {("h1", "drain_gpu_users", "apply"): ["silent"], ("h1", "drain_gpu_users", "probe"): ["failed"]}
    home, world = begin(), World(faults=faults)
    assert run(home, world) == 5
    orders.resolve(home, "h1", "retry")
    assert run(home, world) == 0
    with pytest.raises(NeedsOperator):
        orders.resolve(home, "h1", "done")
    with pytest.raises(UsageError):
        orders.resolve(home, "h9", "retry")


@pytest.mark.case("two-names-one-machine")
def test_two_names_for_one_machine_are_refused(begin: Callable[..., Path]) -> None:
    home, world = begin(2), World(reports={"preflight_host": {"machine_id": "same"}})
    assert run(home, world) == 1
    why = [event.data["why"] for event in events(home) if event.kind == Kind.REJECTED]
    assert why[0] in (
        "h1 and h2 are the same machine (machine-id same)",
        "h2 and h1 are the same machine (machine-id same)",
    )
    assert not [role for _, role, _ in world.ledger if role.startswith("drain")]
    assert Status.DONE not in [status for step, status in statuses(home, "h2").items() if not step.startswith("pre")]


def test_another_machine_under_the_same_name_is_held(begin: Callable[..., Path]) -> None:
    home, world = begin(), World(reports={"verify_host": {"machine_id": "other"}})
    assert run(home, world) == 5
    assert statuses(home)["verify/host"] == Status.HELD


def test_a_host_of_another_change_is_exit_7(begin: Callable[..., Path]) -> None:
    home, world = begin(2), World(faults={("h2", "preflight_host", "apply"): ["refused"]})
    assert run(home, world) == 7
    assert not [role for _, role, _ in world.ledger if role.startswith("drain")]


def test_pause_ends_after_what_is_in_flight_and_resume_goes_on(begin: Callable[..., Path]) -> None:
    home, world = begin(), World()

    def observer(event: Event, _state: Any) -> None:
        if event.phase == "drain" and event.kind == Kind.STARTED:
            orders.pause(home)

    run(home, world, observers=[observer])
    assert statuses(home)["drain/gpu_users"] == Status.DONE
    assert statuses(home)["seal/host"] == Status.PENDING
    assert run(home, world) == 0


def test_resume_looks_again_at_what_only_could_not_be_reached(begin: Callable[..., Path]) -> None:
    """And at what failed before anything was done to it; everything else waits for its answer."""
    home, world = begin(2), World(faults={("h2", "preflight_host", "apply"): ["unreachable"]})
    assert run(home, world) == 4
    assert run(home, world) == 0
    held, confused = begin(1), World(reports={"verify_host": {"state": "unknown"}})
    assert run(held, confused) == 5
    played = len(confused.requests)
    assert run(held, confused) == 5
    assert len(confused.requests) == played
