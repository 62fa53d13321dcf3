"""Every fault at every phase, on real hosts, followed by what an operator would do next.

A change of one host meets a fault at each of its plays; several changes go on side by side. Whatever happens, the host
must come to one of the design's end states.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field

import pytest
from changes import NEW_DRIVER, ledger, loaded_driver
from crashing import Controller, Gate, Tally, blow, campaign, failed_results, once
from field import SIDE_BY_SIDE, Ended, Field, overlaps, repeated
from hostfaults import DAY, FAULTS, HOUR, Struck, clock_error, set_clock, set_wrong, small_state
from reliability.figures import Effort, Figures, Row, tried_once

from gpuchange.lab import Host

ROW = Row(
    "Whatever fails while a host is worked on, it ends done, rolled back with proof, stopped safe, or with a question",
    peer="Orca: zombies, irrecoverable; Ironic and AWX: a job whose controller died is failed, never resumed",
    source="spinnaker/orca ZombieExecutionService.kt; openstack/ironic conductor/base_manager.py; AWX reaper.py",
)

STEPS = (
    *("preflight/host", "preflight/haproxy", "preflight/apt", "record/host", "backup/packages", "drain/haproxy"),
    *("drain/gpu_users", "seal/host", "baseline/gpu", "stack/apt", "verify/host", "verify/gpu", "release/gpu_users"),
    *("release/haproxy", "watch/host", "owner_marker"),
)
Pair = tuple[str, str]
PAIRS: tuple[Pair, ...] = tuple((fault, step) for fault in FAULTS for step in STEPS)
ROLLOUT = {"max_unavailable": 1, "canary": 0, "stop_after_failures": 1, "unreachable_timeout": "20s"}
ROUNDS = 5  # answers that an operator gives before it counts as a question that stays
ENDS = {0: "done", 3: "rolled_back_and_proved"}
SAFE = {1: "stopped_before_any_change", 4: "stopped_before_any_change"}


@dataclass
class Course:
    """What one host went through: the pairs tried, and where each change ended."""

    host: str
    tried: list[Pair] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    overlaps: int = 0
    resumed: int = 0
    answered: int = 0


def undisturbed(controller: Controller, host: Host) -> Tally:
    return campaign(controller, host, lambda _gate: False, blow("before", "tree"))


def course(lab_field: Field, pairs: Sequence[Pair]) -> Course:
    """Changes of one host, one after the other, until every pair was tried."""
    with lab_field.host() as host:
        told, todo = Course(host.name), list(pairs)
        while todo:
            if told.ends:
                lab_field.renew(host)
                lab_field.lab.wait_serving([host.name])
            before = len(told.tried)
            _change(lab_field, host, todo, told)
            if len(told.tried) == before:
                told.broken.append(f"{host.name}: no play came for {todo}")
                break
    return told


def _change(lab_field: Field, host: Host, todo: list[Pair], told: Course) -> None:
    controller = lab_field.controller("orphaned", host, rollout=ROLLOUT)
    looks, written, first = lab_field.looks(host), ledger(host), len(told.tried)
    with contextlib.ExitStack() as around:
        if any(fault == "controller-disk-full" for fault, _ in todo):
            around.enter_context(small_state(controller))
        if any(fault.startswith("clock") for fault, _ in todo):
            set_wrong(controller)
        code = _carry(controller, host, todo, told)
        tried = told.tried[first:]
        _judge(lab_field, controller, host, code, looks, tried, told)
        lasting = not any(FAULTS[fault].crash or "disk" in fault for fault, _ in tried)
        if code == 0 and lasting:
            gained = {name: lines[len(written[name]) :] for name, lines in ledger(host).items()}
            empty: dict[str, list[str]] = {}
            run = Ended(controller, host, Tally(), empty, empty, gained, [], failed_results(host, controller.id), [])
            told.broken += [f"{host.name}: {what} in {tried}" for what in repeated(run)]


def _carry(controller: Controller, host: Host, todo: list[Pair], told: Course) -> int:
    """Apply, meet the faults, and do the natural next thing, until there is none. Returns the last exit code."""
    command, rounds = ["apply", str(controller.directory / "plan.yaml"), "--yes"], 0
    while True:
        struck, process = len(told.tried), controller.begin(*command)
        while gate := controller.until(process, lambda gate: _fault_for(gate, todo) is not None):
            pair = _fault_for(gate, todo)
            assert pair
            todo.remove(pair)
            told.tried.append(pair)
            FAULTS[pair[0]].strike(Struck(controller, process, gate, host))
        code = process.wait()
        for fault, _ in told.tried[struck:]:
            FAULTS[fault].mend(host)
        host.wait_ready()
        if "Traceback" in controller.said():
            told.broken.append(f"{host.name}: traceback after {told.tried[struck:]}: {controller.said()}")
        rounds = rounds + 1 if len(told.tried) == struck else 0
        if code in ENDS or rounds > ROUNDS or not any(controller.state.glob("[!.]*/journal.db")):
            return code
        _answer(controller, host, code, told)
        command = ["resume", controller.id, "--yes"]


def _fault_for(gate: Gate, todo: Sequence[Pair]) -> Pair | None:
    return next((p for p in todo if p[1] == gate.step and gate.tasks in ("apply", "undo") and gate.forward), None)


def _answer(controller: Controller, host: Host, code: int, told: Course) -> None:
    """A held host is told to try again, unless it could only not be reached: then resuming is answer enough."""
    told.resumed += 1
    asked = f"gpuchange resolve {controller.id} {host.name}" in controller.said()
    if code in (5, 6) and asked and "unreachable" not in controller.said():
        told.answered += 1
        controller.run("resolve", controller.id, host.name, "--retry", timeout=120)


def _judge(
    lab_field: Field, controller: Controller, host: Host, code: int, looks: dict[str, list[str]],
    tried: list[Pair], told: Course,
) -> None:  # fmt: skip
    """The host is in the end state that the exit code names."""
    told.overlaps += len(overlaps(controller))
    told.broken += [f"{host.name}: {what} in {tried}" for what in overlaps(controller)]
    now, wrong = lab_field.looks(host), ""
    serving = lab_field.lab.serving()[host.name]
    if code == 0 and (loaded_driver(host) != NEW_DRIVER or now["HAProxy"] != looks["HAProxy"]):
        wrong = f"done, but {loaded_driver(host)} and {now['HAProxy']}"
    if code == 3 and (differs := [name for name in looks if looks[name] != now[name]]):
        wrong = f"rolled back, but unlike before: {[(looks[name], now[name]) for name in differs]}"
    if code in SAFE and now != looks:
        wrong = f"exit {code} says that nothing was changed, but {[n for n in looks if looks[n] != now[n]]} was"
    if code == 5 and "held" not in controller.run("status", controller.id, timeout=120).out:
        wrong = "exit 5, but no host is held"
    if code not in {*ENDS, *SAFE, 5}:
        wrong = f"exit {code}"
    told.ends.append({**ENDS, **SAFE, 5: "needs_operator"}.get(code, "outside"))
    if wrong:
        told.broken.append(f"{host.name} ({serving}) after {tried}: {wrong}\n{controller.said()[-3000:]}")


def courses(effort: Effort) -> list[list[Pair]]:
    """All pairs, a fault a course; or a seeded tenth of them on a few hosts, no two at one step of a course."""
    if effort.full:
        return [[pair for pair in PAIRS if pair[0] == fault] for fault in FAULTS]
    drawn = random.Random(effort.seed).sample(PAIRS, len(PAIRS) // 10)
    hosts: list[dict[str, Pair]] = [{} for _ in range(SIDE_BY_SIDE)]
    for pair in drawn:
        free = [host for host in hosts if pair[1] not in host]
        min(free or hosts, key=len).setdefault(pair[1], pair)
    return [list(host.values()) for host in hosts if host]


def _course(lab_field: Field, pairs: list[Pair], effort: Effort) -> Course:
    """Hours, in full: what is through is not tried again after an interruption."""
    if not effort.full:
        return course(lab_field, pairs)
    return Course(**tried_once(f"orphaned_work-{pairs[0][0]}", lambda: asdict(course(lab_field, pairs))))


@pytest.mark.timeout(14400)
def test_every_fault_at_every_phase_ends_in_an_end_state(field: Field, effort: Effort, figures: Figures) -> None:
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        told = list(pool.map(lambda pairs: _course(field, pairs, effort), courses(effort)))
    for one in told:
        figures.tried += len(one.tried)
        figures.broken += one.broken
        figures.count(
            pairs_tried=len(one.tried), pairs_outside_the_end_states=one.ends.count("outside"),
            overlaps_of_one_action=one.overlaps, resumed=one.resumed, answered=one.answered,
        )  # fmt: skip
        for end in one.ends:
            figures.count(**{f"ended_{end}": 1})


# -- clocks of hosts --------------------------------------------------------------------------------------------------


def on_a_wrong_clock(lab_field: Field, seconds: int) -> list[str]:
    """A change of a host whose clock is a day off, its controller killed at work four times; what is wrong then."""
    with lab_field.host() as host:
        set_clock(host, seconds, lab_field.new_directory("wrong-clock"))
        if abs(clock_error(host) - seconds) > HOUR:
            return [f"the clock is not off: {clock_error(host)} s"]
        controller, before = lab_field.controller("clock", host), lab_field.looks(host)
        steps = ("backup/packages", "seal/host", "stack/apt", "watch/host")
        kills = once(only=lambda gate: gate.step in steps and gate.tasks == "apply")
        tally = campaign(controller, host, kills, blow("acting", "tree"))
        wrong = [] if tally.code == 0 else [f"exit {tally.code}: {controller.said()}"]
        wrong += [] if tally.kills.total() == len(steps) else [f"killed at {tally.kills} only"]
        wrong += [] if loaded_driver(host) == NEW_DRIVER else [f"driver {loaded_driver(host)}"]
        wrong += [] if lab_field.looks(host)["HAProxy"] == before["HAProxy"] else ["it does not serve as before"]
        at = [event.at for event in controller.events()]
        return wrong + ([] if at == sorted(at) else ["the journal is out of order"]) + overlaps(controller)


@pytest.mark.timeout(3600)
def test_the_clock_of_a_host_orders_nothing(field: Field, effort: Effort, figures: Figures) -> None:
    offsets = [-DAY, DAY] if effort.full else [[-DAY, DAY][effort.seed % 2]]
    with ThreadPoolExecutor(len(offsets)) as pool:
        for offset, wrong in pool.map(lambda offset: (offset, on_a_wrong_clock(field, offset)), offsets):
            figures.tried += 1
            figures.broken += [f"{offset} s: {what}" for what in wrong]
