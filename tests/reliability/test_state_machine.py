"""The engine against a small model, by Hypothesis: whatever fails, is half done, crashes or is ordered, in any order.

The engine, its journal and the operator's orders are real; hosts are those of modelworld.py, which judge every act.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from gpuchange import change as changes
from gpuchange import engine as engines
from gpuchange import orders
from gpuchange.change import Change, Connection
from gpuchange.errors import NeedsOperator
from gpuchange.planner import exit_code, summary
from gpuchange.states import Event, Status
from reliability.crash_plans import soon
from reliability.figures import Effort, Figures, Row
from reliability.modelworld import DRAIN, FAULTS, Crash, World
from tests.fleetfake import PROVIDERS

ROW = Row(
    "Whatever fails, crashes or is ordered: each step once, in order, within the limits, to a named end",
    peer="DBOS and Temporal: at least once; Ironic, AWX: an interrupted run is failed, not resumed",
    source="their documentation; ironic conductor/base_manager.py, awx main/dispatch/reaper.py",
)
HOSTS = ("h1", "h2", "h3")
LIMITS = (
    ("rollout: {max_unavailable: 1, canary: 1}", "rollback: {on_failure: host}", 1),
    ("rollout: {max_unavailable: 2, canary: 0, stop_after_failures: 3}", "rollback: {on_failure: change}", 2),
    ("rollout: {max_unavailable: 2, canary: 0, stop_after_failures: 3}", "rollback: {on_failure: hold}", 2),
)
PLAN = "version: 1\nname: model\nreason: a test\ninventory: inventory.yaml\nhosts: [all]\n"
IN_FLIGHT = engines.IN_FLIGHT
ENDS = ("done", "rolled back", "left", "failed before change", "pending", "in service")
"""Where hosts may stand when nothing is wrong any more and a human has answered; the last two: behind a closed gate."""
WAITS_FOR_A_PLACE = "going back: release"  # it must go out of service again, and a host that was left takes the place
PATIENCE = 40  # runs and answers until every host has ended


@pytest.fixture(scope="module")
def templates() -> Iterator[list[Path]]:
    """A change that has just been created, for each of LIMITS; in memory, since no power is cut here."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(dir=_memory()) as folder:
        patch.setattr("gpuchange.providers.PROVIDERS", tuple(_impatient(row) for row in PROVIDERS))
        patch.setattr("gpuchange.judging.FIRST_BACKOFF", 0.001)
        patch.setattr("gpuchange.judging.LONGEST_BACKOFF", 0.001)
        patch.setattr("gpuchange.content.playbooks", lambda: _light(Path(folder)))
        for name in ("end_orphans", "sweep"):  # there are no processes here
            patch.setattr(f"gpuchange.engine.{name}", lambda _change: 0)
        yield [_template(Path(folder) / str(number), *lines) for number, (*lines, _) in enumerate(LIMITS)]


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _impatient(row: Any) -> Any:
    return dataclasses.replace(row, judge=soon, judge_undo=soon)


def _light(folder: Path) -> Path:
    (folder / "playbooks").mkdir(exist_ok=True)
    (folder / "playbooks" / "phase.yml").touch()
    return folder / "playbooks"


def _template(root: Path, *lines: str) -> Path:
    root.mkdir()
    names = "".join(f"    {name}: {{ansible_connection: local}}\n" for name in HOSTS)
    (root / "inventory.yaml").write_text(f"all:\n  hosts:\n{names}")
    (root / "plan.yaml").write_text(PLAN + "\n".join(lines) + "\n")
    return changes.create(root / "state", root / "plan.yaml", Connection())


class Machine(RuleBasedStateMachine):
    """One change and its operator."""

    def __init__(self, templates: list[Path], figures: Figures) -> None:
        super().__init__()
        self.templates, self.figures = templates, figures
        self.folder = Path(tempfile.mkdtemp(dir=_memory()))
        self.world = World(1)
        self.home = self.folder

    @initialize(which=st.integers(0, len(LIMITS) - 1))
    def begin(self, which: int) -> None:
        self.prepare(which)

    def prepare(self, which: int) -> None:
        self.home = Path(shutil.copytree(self.templates[which], self.folder / self.templates[which].name))
        self.world = World(LIMITS[which][2])
        self.figures.count(changes=1)

    # -- what happens ---------------------------------------------------------------------------------------------

    @rule(
        host=st.sampled_from(HOSTS), role=st.sampled_from(tuple(World.roles())),
        tasks=st.sampled_from(("apply", "undo", "probe")), fault=st.sampled_from(FAULTS),
    )  # fmt: skip
    def goes_wrong(self, host: str, role: str, tasks: str, fault: str) -> None:
        """The next time that this host is asked for this."""
        self.world.faults[host, role, tasks] = fault

    @rule()
    def run(self) -> None:
        self._run()

    @rule(events=st.integers(1, 40))
    def crash_at_event(self, events: int) -> None:
        """The controller dies right after it has written its so-manyth event."""

        def observe(event: Event, _state: Any) -> None:
            nonlocal events
            events -= 1
            if events <= 0:
                raise Crash

        self._run(observe)

    @rule(answers=st.integers(0, 12))
    def crash_after_act(self, answers: int) -> None:
        """The controller dies when a host has acted, and nobody has read its report."""
        self.world.answers_left = answers
        self._run()
        self.world.answers_left = -1

    @rule(events=st.integers(1, 30))
    def pause(self, events: int) -> None:
        def observe(event: Event, _state: Any) -> None:
            nonlocal events
            events -= 1
            if events == 0:
                orders.pause(self.home)

        self._run(observe)

    @rule(hosts=st.sets(st.sampled_from(HOSTS)))
    def order_back(self, hosts: set[str]) -> None:
        """All hosts, when none is named."""
        orders.rollback(self.home, sorted(hosts) or None)
        self.world.going_back |= hosts or set(HOSTS)

    @rule(host=st.sampled_from(HOSTS), answer=st.sampled_from(("retry", "done", "undo", "leave")))
    def resolve(self, host: str, answer: str) -> None:
        self._resolve(host, answer)

    # -- how -------------------------------------------------------------------------------------------------------

    def _run(self, *observers: Callable[[Event, Any], None]) -> None:
        engine = engines.Engine(self.home, Connection(), observers, player=self.world.play)  # type: ignore[arg-type]
        self.figures.count(runs=1)
        try:
            engine.run()
            engine.close()
        except Crash:
            self.figures.count(crashes=1)
            engine.change.journal.close()
        else:
            moving = [
                key
                for host in engine.change.state.hosts.values()
                for key, s in host.steps.items()
                if s.status in IN_FLIGHT
            ]
            assert not moving, f"the run ended with plays in flight: {moving}"

    def _resolve(self, host: str, answer: str) -> None:
        with self._folded() as change:
            stuck = orders.asking(change.state.hosts[host])
        try:
            orders.resolve(self.home, host, answer)
        except NeedsOperator:
            assert stuck is None and answer in ("retry", "done")
            return
        if answer == "done":
            assert stuck is not None
            (phase, _), direction = stuck
            self.world.by_hand(host, phase, direction)
        if answer in ("retry", "done"):
            self.world.going_back.discard(host)
        if answer == "undo":
            self.world.going_back.add(host)

    @contextmanager
    def _folded(self) -> Iterator[Change]:
        change = Change.open(self.home, readonly=True)
        try:
            yield change
        finally:
            change.journal.close()

    # -- what must hold --------------------------------------------------------------------------------------------

    @invariant()
    def every_act_was_legal(self) -> None:
        assert self.world.wrong == []

    @precondition(lambda self: self.home != self.folder)
    @invariant()
    def the_journal_tells_the_truth(self) -> None:
        with self._folded() as change:
            change.journal.verify()
            for host, standing in change.state.hosts.items():
                statuses = {phase: step.status for (phase, _), step in standing.steps.items()}
                for role, said in told(statuses).items():
                    key = (host, role)
                    assert said is None or (key not in self.world.half and said == (key in self.world.applied)), (
                        f"{host} {role}: the journal says {said}, the host {key in self.world.applied}: {statuses}"
                    )
            assert change.state.counts.out >= len({h for h in self.world.drained() if not change.state.hosts[h].left})

    def teardown(self) -> None:
        try:
            if self.home != self.folder:
                self._to_the_end()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _to_the_end(self) -> None:
        """Nothing goes wrong any more, and a human answers: every host comes to one of the named ends."""
        self.world.faults.clear()
        for _ in range(PATIENCE):
            self._run()
            with self._folded() as change:
                held = [
                    host
                    for host in HOSTS
                    if change.state.hosts[host].held
                    or (change.state.hosts[host].failed and not change.state.hosts[host].turned)
                ]
                words, code = summary(change.state), exit_code(change.state)
                left_out = any(host.left and host.out for host in change.state.hosts.values())
            open_ones = [host for host in held if words[host] not in ENDS]
            if not open_ones:
                break
            for host in open_ones:
                self._resolve(host, "retry")
        self.the_journal_tells_the_truth()
        self.every_act_was_legal()
        ends = {*ENDS, WAITS_FOR_A_PLACE} if left_out else {*ENDS}
        assert set(words.values()) <= ends, words
        assert code in (0, 1, 3, 4, 5), code
        self.figures.tried += self.world.acts


def told(statuses: dict[str, Status]) -> dict[str, bool | None]:
    """What the journal says of each role: applied, not applied, or None where it does not know."""
    known = {Status.DONE: True, Status.PENDING: False, Status.UNDONE: False}
    said = {phase: known.get(status) for phase, status in statuses.items()}
    drain, release = said.pop("drain"), said.pop("release")
    drained = None if drain is None or release is None else drain and not release
    names = {role.partition("_")[0]: role for role in World.roles()}
    return {DRAIN: drained, **{names[phase]: there for phase, there in said.items()}}


class Careless(Machine):
    @initialize(which=st.integers(0, len(LIMITS) - 1))
    def begin(self, which: int) -> None:
        self.prepare(which)
        self.world.careless = True


def drive(machine: Callable[[], Machine], examples: int, effort: Effort, **more: Any) -> None:
    chosen = settings(
        max_examples=examples, stateful_step_count=12, deadline=None, database=None, derandomize=not effort.full,
        suppress_health_check=list(HealthCheck), **more,
    )  # fmt: skip
    run_state_machine_as_test(hypothesis.seed(effort.seed)(machine) if effort.full else machine, settings=chosen)


def test_the_engine_keeps_to_the_model(templates: list[Path], effort: Effort, figures: Figures) -> None:
    drive(lambda: Machine(templates, figures), effort.of(full=3000, short=60), effort)


def test_this_test_can_fail(templates: list[Path], effort: Effort) -> None:
    """An engine that is told by every look that nothing was done repeats, and the model sees it."""
    with pytest.raises(AssertionError, match="repeated"):
        drive(lambda: Careless(templates, Figures()), 60, effort, phases=[Phase.generate], report_multiple_bugs=False)
