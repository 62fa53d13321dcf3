"""kill -9 at fixed moments of every phase, then `gpuchange resume`: nothing is lost, nothing is done twice.

Every run is one change of one host: each of its plays in turn is struck at one moment. The runs go on side by side, one
host each; the tests then look at what each came to. In `make test` a run deals the strikes out in turn; a run for each
pair of strike and moment is in `make test-all`.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import cycle, islice
from typing import Any

import pytest
from crashing import MOMENTS, STRIKES, Controller, Gate, Tally, alive, blow, campaign, once, takeovers
from field import SIDE_BY_SIDE, Ended, Field, Run, overlaps, repeated, unlike

from gpuchange.lab import Host
from gpuchange.player import carriers
from gpuchange.states import Kind
from gpuchange.waiting import wait_until

PHASES = {
    *("preflight", "record", "backup", "drain", "seal", "baseline", "stack", "verify", "release", "watch"),
    "owner_marker",
}
SERIES = [(strike, moment) for strike in STRIKES for moment in MOMENTS]


def undisturbed(controller: Controller, host: Host) -> Tally:
    return campaign(controller, host, lambda _gate: False, blow("before", "tree"))


def every_step(strike: str, moment: str) -> Run:
    return lambda controller, host: campaign(controller, host, once(), blow(moment, strike))


def in_turn(moment: str) -> Run:
    """Every step struck at this moment, by each of the strikes in turn; the turns of the moments differ."""

    def run(controller: Controller, host: Host) -> Tally:
        turns = islice(cycle(STRIKES), list(MOMENTS).index(moment), None)
        falls = {strike: blow(moment, strike) for strike in STRIKES}
        return campaign(controller, host, once(), lambda *at: falls[next(turns)](*at))

    return run


RUNS: dict[str, Run] = {
    "undisturbed": undisturbed,
    **{moment: in_turn(moment) for moment in MOMENTS},
    **{f"{strike}-{moment}": every_step(strike, moment) for strike, moment in SERIES},
}


@pytest.fixture(scope="module")
def ended(request: pytest.FixtureRequest, field: Field) -> Iterator[dict[str, Future[Ended]]]:
    """Every run that a selected test asks for, begun at once."""
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        yield {name: pool.submit(field.carry, name, RUNS[name]) for name in _asked_for(request)}


def _asked_for(request: pytest.FixtureRequest) -> list[str]:
    wanted = {"undisturbed"}
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.module is request.module and hasattr(item, "callspec"):
            wanted.add(str(item.callspec.params.get("run", "undisturbed")))
    return [name for name in RUNS if name in wanted]


def as_undisturbed(run: Ended, reference: Ended) -> None:
    assert not unlike(run, reference)
    assert len(run.gained["boots"]) == 1


def test_an_undisturbed_run_is_what_the_others_are_held_against(ended: dict[str, Future[Ended]]) -> None:
    reference = ended["undisturbed"].result()
    assert {gate.step.partition("/")[0] for gate in reference.controller.gates} == PHASES
    assert reference.before["packages"] != reference.after["packages"]
    as_undisturbed(reference, reference)


@pytest.mark.parametrize(
    "run",
    [
        *MOMENTS,
        *(pytest.param(f"{strike}-{moment}", marks=pytest.mark.slow) for strike, moment in SERIES),
    ],
)
def test_killed_at_one_moment_of_every_step_and_resumed(run: str, ended: dict[str, Future[Ended]]) -> None:
    found, reference = ended[run].result(), ended["undisturbed"].result()
    tally = found.tally
    print(f"{run}: {tally.kills.total()} kills in {tally.seconds:.0f} s, {tally.orphans} plays outlived them")
    assert set(found.tally.kills) == {f"{gate.step} {gate.tasks}" for gate in reference.controller.gates}
    events = found.controller.events()
    assert takeovers(events) == found.tally.kills.total() + 1
    as_undisturbed(found, reference)
    if run in ("before", "engine-before"):
        resumes = [event for event in events if event.kind is Kind.CONTROLLER and event.data["fence"] > 1]
        struck_alone = resumes if run == "engine-before" else resumes[:: len(STRIKES)]
        assert found.tally.orphans == len(struck_alone), "plays must outlive a controller that is killed alone"
        assert all(event.data["orphans"] for event in struck_alone)


# -- killed again while resuming --------------------------------------------------------------------------------------


def killed_again(controller: Controller, host: Host) -> Tally:
    """At four steps: the play is killed at work, the resume's look at it too, and the next resume's look once more."""
    wanted = ("drain/haproxy", "stack/apt", "verify/host", "release/haproxy")
    acts = once(1, only=lambda gate: gate.step in wanted and gate.tasks != "probe")
    looks = once(2, only=lambda gate: gate.step in wanted and gate.tasks == "probe")
    at_work, ended_unread = blow("acting", "engine"), blow("unrecorded", "engine")

    def fall(controller: Controller, process: subprocess.Popen[bytes], gate: Gate, host: Host) -> int:
        return (ended_unread if gate.tasks == "probe" else at_work)(controller, process, gate, host)

    return campaign(controller, host, lambda gate: acts(gate) or looks(gate), fall)


RUNS["again"] = killed_again


@pytest.mark.parametrize("run", ["again"])
def test_killed_again_and_again_while_resuming(run: str, ended: dict[str, Future[Ended]]) -> None:
    found = ended[run].result()
    assert sum(count for name, count in found.tally.kills.items() if name.endswith("probe")) == 8
    assert found.tally.kills.total() == 12
    as_undisturbed(found, ended["undisturbed"].result())


# -- killed on the way back -------------------------------------------------------------------------------------------


def way_back(strike: str, moment: str) -> Run:
    """A driver that computes wrong values; struck at every play that takes it back."""

    def run(controller: Controller, host: Host) -> Tally:
        host.break_("wrong-values")
        acts = once(1, only=lambda gate: gate.tasks == "undo" or gate.step == "owner_marker")
        return campaign(controller, host, acts, blow(moment, strike))

    return run


BACK = [("engine", "before"), ("engine", "acting"), ("engine", "unrecorded"), ("tree", "acting")]
RUNS |= {f"back-{strike}-{moment}": way_back(strike, moment) for strike, moment in BACK}


def back(strike: str, moment: str) -> Any:
    """One of these four runs stands for all in `make test`: each costs a whole change and a rollback."""
    marks = () if (strike, moment) == ("tree", "acting") else (pytest.mark.slow,)
    return pytest.param(f"back-{strike}-{moment}", marks=marks)


@pytest.mark.parametrize("run", [back(strike, moment) for strike, moment in BACK])
def test_killed_at_one_moment_of_every_step_back(run: str, ended: dict[str, Future[Ended]]) -> None:
    found = ended[run].result()
    undone = {"stack/apt undo", "seal/host undo", "drain/gpu_users undo", "drain/haproxy undo", "owner_marker apply"}
    assert set(found.tally.kills) == undone
    assert found.tally.code == 3, found.controller.said()
    assert found.after == found.before
    assert len(found.gained["boots"]) == 2, "one on the way there, one on the way back"
    assert not repeated(found) + overlaps(found.controller) + found.left


# -- asked to stop ----------------------------------------------------------------------------------------------------

STOPS = {
    "backup/packages": (signal.SIGTERM, 1),
    "seal/host": (signal.SIGINT, 1),
    "stack/apt": (signal.SIGTERM, 2),
    "verify/host": (signal.SIGINT, 2),
}


def asked_to_stop(controller: Controller, host: Host) -> Tally:
    """Signals as an operator sends them, once or twice, while a play is at work on the host; then resume."""
    return campaign(controller, host, once(only=lambda gate: gate.step in STOPS and gate.tasks == "apply"), stop)


def stop(controller: Controller, process: subprocess.Popen[bytes], gate: Gate, host: Host) -> int:
    """Send the signal(s); check what the run then does with the play in flight, and how it ends."""
    number, times = STOPS[gate.step]
    MOMENTS["acting"](controller, process, gate, host)
    process.send_signal(number)
    if times > 1:
        wait_until(lambda: "once more" in controller.said(), timeout=60, what="the first signal to be heard")
        process.send_signal(number)
    assert controller.until(process, lambda other: other.step != "owner_marker") is None, (
        "a play began after the signal"
    )
    assert process.returncode == 128 + number, controller.said()
    mine = [event for event in controller.events() if event.attempt == gate.attempt]
    assert [event.kind for event in mine] == [Kind.STARTED, Kind.ACCEPTED if times == 1 else Kind.LOST]
    assert not [pid for pid in carriers(controller.id) if alive(pid)], "a play outlived its controller"
    return 0


RUNS["stops"] = asked_to_stop


@pytest.mark.parametrize("run", ["stops"])
def test_asked_to_stop_and_resumed(run: str, ended: dict[str, Future[Ended]]) -> None:
    found = ended[run].result()
    assert set(found.tally.kills) == {f"{step} apply" for step in STOPS}
    as_undisturbed(found, ended["undisturbed"].result())
