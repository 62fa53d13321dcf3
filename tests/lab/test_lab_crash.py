"""Controllers killed at points drawn by a seed, on real hosts, then resumed: nothing is lost, nothing is done twice."""

from __future__ import annotations

import contextlib
import random
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
from crashing import MOMENTS, POLL, STRIKES, Controller, Gate, Tally, alive, campaign, takeovers
from field import SIDE_BY_SIDE, Ended, Field, unlike
from reliability.figures import Effort, Figures, Row

from gpuchange.lab import Host
from gpuchange.waiting import WaitTimeout, wait_until

ROW = Row(
    "A controller killed at any moment of a change of real hosts loses no step and does none twice",
    peer="Terraform, Temporal, DBOS: killed after the effect, the open step is repeated 6 of 6 times",
    source="the same kill of each; Temporal and DBOS document steps that run at least once",
)

STEPS = (
    *("preflight/host", "preflight/apt", "record/host", "backup/packages", "drain/haproxy", "drain/gpu_users"),
    *(
        "seal/host",
        "baseline/gpu",
        "stack/apt",
        "verify/host",
        "verify/gpu",
        "release/gpu_users",
        "release/haproxy",
        "watch/host",
    ),
    "owner_marker",
)
LONGEST = 4.0  # seconds into a play at which a random kill still falls
AT_RANDOM = "at random"


@dataclass(frozen=True)
class Point:
    """Where a kill falls: the play of `step`, a moment of crashing.MOMENTS or `delay` seconds into it; and on what."""

    step: str
    moment: str
    delay: float
    strike: str


def draw(seed: str, number: int) -> dict[str, Point]:
    """`number` points at as many steps."""
    dice = random.Random(seed)
    return {
        step: Point(
            step,
            dice.choice([*MOMENTS, AT_RANDOM, AT_RANDOM, AT_RANDOM]),
            round(dice.uniform(0, LONGEST), 2),
            dice.choice(list(STRIKES)),
        )
        for step in dice.sample(STEPS, number)
    }


def killed_at(points: dict[str, Point], controller: Controller, host: Host) -> Tally:
    left = dict(points)

    def choose(gate: Gate) -> bool:
        return gate.step in left and gate.tasks != "probe"

    def fall(controller: Controller, process: subprocess.Popen[bytes], gate: Gate, host: Host) -> int:
        point = left.pop(gate.step)
        if point.moment == AT_RANDOM:
            gate.go()
            with contextlib.suppress(WaitTimeout):
                wait_until(lambda: not alive(gate.child), timeout=point.delay, what="the play's end", interval=POLL)
        else:
            MOMENTS[point.moment](controller, process, gate, host)
        STRIKES[point.strike](controller, process)
        return int(alive(gate.child))

    return campaign(controller, host, choose, fall)


def crashed(field: Field, points: dict[str, Point]) -> Ended:
    return field.carry("crashed", lambda controller, host: killed_at(points, controller, host))


def _ended(**other: Any) -> Ended:
    """A run as it might have ended, without a lab."""
    controller = SimpleNamespace(gates=other.pop("gates", []), said=lambda: "")
    kept: dict[str, Any] = {
        "tally": Tally(code=0),
        "before": {"HAProxy": ["UP"]},
        "after": {"HAProxy": ["UP"], "packages": ["a 2"]},
        "gained": {"packages": ["a 2 configure"], "boots": ["1"]},
        "begun": ["stack-do-reboot.begun"],
        "failed": {},
        "left": [],
        **other,
    }
    return Ended(controller=cast(Any, controller), host=cast(Any, SimpleNamespace(name="gpu1")), **kept)


@pytest.mark.parametrize(
    ("what", "other"),
    [
        ("exit 5", {"tally": Tally(code=5)}),
        ("ran 2 times", {"gained": {"packages": ["a 2 configure"] * 2, "boots": ["1"]}}),
        ("boots", {"gained": {"packages": ["a 2 configure"], "boots": ["1", "2"]}}),
        ("long works", {"begun": []}),
        ("looks", {"after": {"HAProxy": ["UP"], "packages": ["a 1"]}}),
        ("HAProxy", {"after": {"HAProxy": ["DRAIN"], "packages": ["a 2"]}}),
        ("beside", {"gates": [SimpleNamespace(step="stack/apt", tasks="apply", beside=("7 c/1.2",))]}),
        ("left behind", {"left": ["gpu1: owner.json"]}),
    ],
)
def test_what_must_not_be_would_be_seen(what: str, other: dict[str, Any]) -> None:
    assert not unlike(_ended(), _ended())
    assert any(what in said for said in unlike(_ended(**other), _ended()))


@pytest.mark.timeout(3600)
def test_killed_at_points_drawn_by_a_seed(field: Field, effort: Effort, figures: Figures) -> None:
    campaigns, each = effort.of(full=4, short=1), effort.of(full=10, short=4)
    drawn = [draw(f"{effort.seed}/{number}", each) for number in range(campaigns)]
    for points in drawn:
        print(f"seed {effort.seed}:", *points.values(), sep="\n  ")
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        reference, *ended = pool.map(lambda points: crashed(field, points), [{}, *drawn])
    figures.broken += [f"undisturbed: {what}" for what in unlike(reference, reference)]
    for points, run in zip(drawn, ended, strict=True):
        figures.tried += run.tally.kills.total()
        figures.count(kills=run.tally.kills.total(), plays_that_outlived_them=run.tally.orphans)
        wrong = unlike(run, reference)
        if run.tally.kills.total() != len(points) or takeovers(run.controller.events()) != len(points) + 1:
            wrong.append(
                f"{run.tally.kills} and {takeovers(run.controller.events())} controllers for {len(points)} points"
            )
        figures.broken += [f"{list(points.values())}: {what}" for what in wrong]
