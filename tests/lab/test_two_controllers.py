"""Two controllers after one host: of one state directory, and of two, one of them stopped and continued later."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass

import pytest
from changes import NEW_DRIVER, OLD_DRIVER, ledger, loaded_driver, owner_marker, since
from crashing import MOMENTS, Controller, Gate, descendants, kill_tree, once
from field import SIDE_BY_SIDE, Field
from reliability.figures import Effort, Figures, Row, tried_once

from gpuchange import locking
from gpuchange.lab import Host
from gpuchange.states import Event, Kind
from gpuchange.waiting import wait_until

ROW = Row(
    "Two controllers never both act on a host; one that was shut out is refused by the host itself, also when it comes "
    "back after it was only stopped",
    peer="etcd: a lease does not keep a paused holder from writing",
    source="etcd-io/etcd contrib/lock/README.md",
)

STEPS = (
    *("backup/packages", "drain/haproxy", "drain/gpu_users", "seal/host", "baseline/gpu", "stack/apt", "verify/host"),
    *("release/gpu_users", "release/haproxy", "watch/host"),
)
BEFORE_IT_ACTED = STEPS[:1]  # stopped here, it had done nothing that a rollback could give back
AFTER_STACK = STEPS[STEPS.index("verify/host") :]
BACK = {"provider": "apt", "driver": OLD_DRIVER, "cuda": "12.4.1", "cudnn": "9.1.0", "container_toolkit": "1.16.2"}
SHUT_OUT = {"released", "locked", "stale"}


@contextmanager
def stopped(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """SIGSTOP for a controller and all it started; continued at the end."""
    process.send_signal(signal.SIGSTOP)
    all_of_it = [process.pid, *descendants(process.pid)]
    for pid in all_of_it:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield all_of_it
    finally:
        for pid in reversed(all_of_it):
            with suppress(ProcessLookupError):  # a kept connection may have been ended meanwhile
                os.kill(pid, signal.SIGCONT)


@contextmanager
def ending(controller: Controller, process: subprocess.Popen[bytes]) -> Iterator[None]:
    """When the test gives up inside, nothing of this run is left."""
    try:
        yield
    except BaseException:
        kill_tree(controller, process)
        raise


def refusals(events: list[Event], after: int = 0) -> set[str]:
    return {
        str(event.data["refused"]["kind"])
        for event in events
        if event.kind is Kind.HELD and event.data.get("refused") and event.seq > after
    }


# -- one state directory ----------------------------------------------------------------------------------------------


def test_the_second_of_one_state_directory_is_told_who_the_first_is(field: Field, figures: Figures) -> None:
    with field.host() as host:
        first = field.controller("first", host)
        with first.running("apply", str(first.directory / "plan.yaml"), "--yes") as process:
            gate = first.until(process, lambda gate: gate.step == "drain/haproxy")
            assert gate
            for command in (["resume", first.id, "--yes"], ["rollback", first.id, "--yes"]):
                second = first.run(*command, timeout=60)
                figures.tried += 1
                wanted = rf"process {process.pid} of {re.escape(locking.user())} on .*boot {locking.boot()}.* since 20"
                if second.code != 7 or not re.search(wanted, second.text):
                    figures.broken.append(f"{command[0]}: exit {second.code}, not 7 with {wanted}: {second.text}")
            gate.go()
            assert first.until(process, lambda _: False) is None
            if process.wait() != 0:
                figures.broken.append(f"the first was disturbed: {first.said()}")


# -- two state directories --------------------------------------------------------------------------------------------


@dataclass
class Meeting:
    """One step at which the first controller was stopped, and what came of it."""

    step: str
    broken: list[str]
    stale_refused: int = 0
    unlocks_refused: int = 0


def meet(field: Field, step: str, moment: str = "before") -> Meeting:
    """The first controller is stopped at `step`; the second is refused, unlocks, works; the first comes back."""
    meeting = Meeting(step, [])
    with field.host() as host:
        first = field.controller("stopped", host)
        second = field.controller("second", host, **({"stack": BACK} if step in AFTER_STACK else {}))
        with first.running("apply", str(first.directory / "plan.yaml"), "--yes") as process:
            gate = first.until(process, once(only=lambda gate: gate.step == step and gate.tasks != "probe"))
            assert gate, f"{step} was never played"
            if moment != "before":
                MOMENTS[moment](first, process, gate, host)
            with stopped(process):
                _second_is_refused(second, meeting)
                _unlock(first, second, host, meeting)
                works = second.begin("apply", str(second.directory / "plan.yaml"), "--yes")
                middle = second.until(works, once(only=lambda gate: gate.step in ("stack/apt", "watch/host")))
                gate.go()
            with ending(second, works):
                _come_back(first, process, host, meeting)
                _second_ends(second, works, middle, host, meeting)
            if middle:
                _never_again(first, host, meeting)
            else:  # the first's work, ended by itself, had made the host what the second wanted: it took nothing
                _goes_on(first, host, meeting)
    return meeting


def _check(meeting: Meeting, true: bool, why: str) -> None:
    if not true:
        meeting.broken.append(f"{meeting.step}: {why}")


def _second_is_refused(second: Controller, meeting: Meeting) -> None:
    said = second.run("apply", str(second.directory / "plan.yaml"), "--yes", timeout=300)
    _check(meeting, said.code == 7, f"beside a stopped controller: exit {said.code}, not 7: {said.text}")


def _unlock(first: Controller, second: Controller, host: Host, meeting: Meeting) -> None:
    reach = ["-i", str(second.lab.inventory), "--yes"]
    shown = second.run("unlock", host.name, "lb1", *reach, timeout=120)
    lock = f"{first.id}/1"
    named = rf"{re.escape(lock)} +process \d+ of {re.escape(locking.user())} on \S+ \(boot {locking.boot()}\) +20"
    _check(meeting, shown.code == 7 and bool(re.search(named, shown.out)), f"unlock does not name it: {shown.text}")
    for wrong in (f"{first.id}/2", f"{first.id[:-1]}/1"):
        said = second.run("unlock", wrong, host.name, "lb1", *reach, timeout=120)
        _check(meeting, said.code == 64 and owner_marker(host), f"{wrong} opened: exit {said.code}: {said.text}")
        meeting.unlocks_refused += said.code == 64

    def opened() -> bool:
        said = second.run("unlock", lock, host.name, "lb1", *reach, timeout=120)
        assert said.code in (0, 7), said.text
        if said.code == 7:
            _check(meeting, "still works on this host" in said.text, f"unlock refused otherwise: {said.text}")
        return said.code == 0

    wait_until(opened, timeout=240, what="the host's work to end, so that it can be unlocked", interval=0.5)


def _come_back(first: Controller, process: subprocess.Popen[bytes], host: Host, meeting: Meeting) -> None:
    """The first goes on as if nothing had been: the host must refuse it, with the second in the middle of its work."""
    written, last = ledger(host), len(first.events())
    assert first.until(process, lambda _: False) is None
    code = process.wait()
    gained = since(written, ledger(host))
    kinds = refusals(first.events(), after=last)
    meeting.stale_refused += bool(kinds)
    _check(meeting, bool(kinds) and kinds <= SHUT_OUT, f"the host did not refuse it: {kinds} {first.said()}")
    _check(meeting, code in (5, 7), f"the first ended with {code}: {first.said()}")
    _check(meeting, not any(gained.values()), f"it acted on the host: {gained}")
    _check(meeting, _owner(host) != first.id, "it took the host back")


def _owner(host: Host) -> str:
    marker = host.root / "var/lib/gpuchange/owner.json"
    found = re.search(r'"change": "([^"]*)"', marker.read_text()) if marker.exists() else None
    return found[1] if found else ""


def _second_ends(
    second: Controller, works: subprocess.Popen[bytes], middle: Gate | None, host: Host, meeting: Meeting
) -> None:
    if middle:
        _check(meeting, _owner(host) == second.id, f"the second does not own the host but {_owner(host)!r}")
        middle.go()
        second.until(works, lambda _: False)
    _check(meeting, works.wait() == 0, f"the second was disturbed: {second.said()}")
    wanted = OLD_DRIVER if meeting.step in AFTER_STACK else NEW_DRIVER
    _check(meeting, loaded_driver(host) == wanted, f"driver {loaded_driver(host)}, not {wanted}")


def _never_again(first: Controller, host: Host, meeting: Meeting) -> None:
    """Also a new controller of the first change finds the host closed: what it knows of it is no longer true."""
    written = ledger(host)
    for command in (["resume", first.id, "--yes"], ["rollback", first.id, "--yes"]):
        process = first.begin(*command)
        first.until(process, lambda _: False)
        code, gained = process.wait(), since(written, ledger(host))
        nothing_to_take_back = command[0] == "rollback" and meeting.step in BEFORE_IT_ACTED and code == 0
        refused = code in (5, 6, 7) or nothing_to_take_back
        _check(meeting, refused, f"{command[0]} of the first afterwards: exit {code}: {first.said()}")
        _check(meeting, not any(gained.values()), f"{command[0]} of the first acted: {gained}")


def _goes_on(first: Controller, host: Host, meeting: Meeting) -> None:
    """A new controller of the first change is let in, since nobody else has acted on the host."""
    process = first.begin("resume", first.id, "--yes")
    first.until(process, lambda _: False)
    _check(meeting, process.wait() == 0, f"resume on a host that nobody took: {first.said()}")
    _check(meeting, loaded_driver(host) == NEW_DRIVER, f"driver {loaded_driver(host)}")


def _meeting(lab_field: Field, step: str, moment: str, effort: Effort) -> Meeting:
    if not effort.full:
        return meet(lab_field, step, moment)
    return Meeting(**tried_once(f"two_controllers-{step}-{moment}", lambda: asdict(meet(lab_field, step, moment))))


@pytest.mark.timeout(3600)
def test_a_stopped_controller_is_shut_out_and_refused_by_the_host(
    field: Field, effort: Effort, figures: Figures
) -> None:
    at = [(step, "before") for step in STEPS] + [(step, "acting") for step in ("seal/host", "stack/apt", "watch/host")]
    chosen = at if effort.full else [at[effort.seed % len(STEPS)]]
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        meetings = list(pool.map(lambda where: _meeting(field, *where, effort), chosen))
    for meeting in meetings:
        figures.tried += 1
        figures.broken += meeting.broken
        figures.count(
            stopped_ones_refused_by_the_host=meeting.stale_refused, wrong_lock_ids_refused=meeting.unlocks_refused
        )
