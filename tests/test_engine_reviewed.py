"""A change that began from a reviewed bundle: which plays look whether hosts still are as reviewed, what follows."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from gpuchange import engine as engines
from gpuchange.change import Change, Connection
from gpuchange.checks import fingerprint
from gpuchange.planner import Limits, Start
from gpuchange.player import Request
from gpuchange.states import Kind, Status
from tests.fakechange import acted, events, run, statuses
from tests.fleetfake import World

pytest_plugins = ["tests.fakechange"]
FACTS = json.loads((Path(__file__).parent / "cases" / "facts" / "two_h100.json").read_text())
REBOOTED = {**FACTS, "boot_id": "another-boot"}
SAYS = "not as reviewed: boot-id was {}, is another-boot (it was rebooted)".format(FACTS["boot_id"])


@dataclass
class Moving(World):
    """`seen`: (host, role, tasks) → the facts that this play finds; all others find the host as reviewed."""

    seen: dict[tuple[str, str, str], Mapping[str, Any]] = field(default_factory=dict)

    def _report(self, request: Request, host: str, state: str) -> dict[str, Any]:
        facts = self.seen.get((host, request.role, request.tasks), FACTS)
        return super()._report(request, host, state) | {"facts": copy.deepcopy(facts)}


@pytest.fixture
def reviewed(begin: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Begins a change whose hosts were reviewed as FACTS says."""

    def create(hosts: int = 1, out: int = 1) -> Path:
        found = {f"h{number}": fingerprint.of({"facts": FACTS}) for number in range(1, hosts + 1)}
        monkeypatch.setattr(Change, "reviewed", property(lambda _change: found))
        monkeypatch.setattr(Change, "limits", property(lambda _change: Limits(out, stop_after_failures=9)))
        return begin(hosts)

    return create


def looks(world: World) -> list[tuple[str, str]]:
    return [(request.role, host) for request in world.requests if request.tasks == "probe" for host in request.hosts]


def test_each_host_is_looked_at_once_more_right_before_it_leaves(reviewed: Callable[..., Path]) -> None:
    home, world = reviewed(2), Moving()
    assert run(home, world) == 0
    assert looks(world) == [("preflight_host", "h1"), ("preflight_host", "h2")]
    order = [(request.role, request.tasks) for request in world.requests if "h1" in request.hosts]
    assert order.index(("preflight_host", "probe")) == order.index(("drain_gpu_users", "apply")) - 1


@pytest.mark.parametrize("phase", ["preflight", "record", "seal"])
def test_what_moved_is_seen_by_each_phase_that_looks(reviewed: Callable[..., Path], phase: str) -> None:
    home, world = reviewed(), Moving(seen={("h1", f"{phase}_host", "apply"): REBOOTED})
    run(home, world)
    held = next(event for event in events(home) if event.kind is Kind.HELD)
    assert (held.phase, held.data["why"]) == (phase, SAYS)
    assert statuses(home)["baseline/gpu"] is Status.PENDING


@pytest.mark.parametrize("role", ["baseline_gpu", "verify_host", "watch_host"])
def test_what_the_change_itself_moves_is_no_matter(reviewed: Callable[..., Path], role: str) -> None:
    home, world = reviewed(), Moving(seen={("h1", role, "apply"): REBOOTED})
    assert run(home, world) == 0


def test_a_host_that_comes_back_is_not_compared_with_what_was_reviewed(reviewed: Callable[..., Path]) -> None:
    home = reviewed()
    world = Moving(seen={("h1", role, "undo"): REBOOTED for role in ("seal_host", "drain_gpu_users")})
    world.faults["h1", "verify_host", "apply"] = ["failed"]
    assert run(home, world) == 3
    assert statuses(home)["seal/host"] is Status.UNDONE


def test_a_host_that_moved_before_its_drain_is_left_alone_and_the_others_go_on(reviewed: Callable[..., Path]) -> None:
    home, world = reviewed(2), Moving(seen={("h1", "preflight_host", "probe"): REBOOTED})
    run(home, world)
    refused = next(event for event in events(home) if event.kind is Kind.REJECTED)
    assert (refused.host, refused.phase, refused.direction) == ("h1", "drain", "do")
    assert refused.data == {"why": f"{SAYS}; left alone", "moved": [SAYS.removeprefix("not as reviewed: ")]}
    assert "drain_gpu_users.apply" not in acted(world, "h1")
    assert "watch_host.apply" in acted(world, "h2")


def test_a_host_that_does_not_answer_the_look_is_drained_and_looked_at_by_seal(reviewed: Callable[..., Path]) -> None:
    home, world = reviewed(2, out=2), Moving(seen={("h2", "preflight_host", "probe"): REBOOTED})
    world.faults["h1", "preflight_host", "probe"] = ["failed"]
    run(home, world)
    assert "drain_gpu_users.apply" in acted(world, "h1") and statuses(home, "h1")["seal/host"] is Status.DONE
    assert "drain_gpu_users.apply" not in acted(world, "h2")


def test_a_host_that_is_out_already_is_not_looked_at_again(reviewed: Callable[..., Path]) -> None:
    home, world = reviewed(), Moving()
    engine = engines.Engine(home, Connection(), player=world.play)  # type: ignore[arg-type]
    engine.run(last_phase="drain")
    step, begun = engine.change.state.table.step("drain", "gpu_users"), len(world.requests)
    start = Start(("h1",), "drain", "gpu_users", "do", "apply")
    assert engine._moved(step, start) == {} and len(world.requests) == begun
    engine.close()


def test_a_soft_stop_ends_no_play_and_a_hard_one_does(begin: Callable[..., Path]) -> None:
    world = World()
    engine = engines.Engine(begin(), Connection(), player=world.play)  # type: ignore[arg-type]
    play = world.play(Request.__new__(Request), Path())
    engine.plays = {1: (play, Start(("h1",), "seal", "host", "do", "apply"))}  # type: ignore[dict-item]
    engine.stop()
    engine._woken()
    assert not play.ended
    engine.stop(hard=True)
    engine._woken()
    assert play.ended
    engine.plays = {}
    engine.close()


def test_a_look_asks_providers_for_the_arguments_of_a_look(
    begin: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    engine = engines.Engine(begin(), Connection(), player=World().play)  # type: ignore[arg-type]
    provider, params = engine.change.provider("preflight", "host")
    told = replace(provider, args=lambda _view, mode: {"mode": asked.append(mode)})
    monkeypatch.setattr(engine.change, "provider", lambda *_: (told, params))
    engine.probe(engine.change.state.table.steps[0], ["h1"])
    assert asked == ["probe"]
    engine.close()
