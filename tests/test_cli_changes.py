"""The verbs that carry changes out, over fake hosts: what is printed, asked, and returned."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import click
import pytest

from gpuchange import engine, inventory
from gpuchange.cli import changes, live, main, words
from gpuchange.history import History
from gpuchange.states import Event, Kind
from tests.fleetfake import PROVIDERS, World

PLAN = """\
version: 1
name: test
reason: because
inventory: inventory.yaml
hosts: [all]
rollout: {max_unavailable: 1, canary: 0, unreachable_timeout: 10s}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a plan for two hosts, h1 and h2, and their inventory."""
    made = tmp_path_factory.mktemp("home")
    (made / "inventory.yaml").write_text("all:\n  hosts:\n    h1: {}\n    h2: {}\n")
    (made / "plan.yaml").write_text(PLAN)
    return made


@pytest.fixture(scope="module")
def resolve() -> Callable[..., inventory.Inventory]:
    """Ansible's answer about the inventory, asked for once: asking takes a second."""
    return cache(partial(_ask, inventory.resolve))


@pytest.fixture
def world(home: Path, resolve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """Fake hosts behind the real engine; the working directory holds their plan."""
    made = World()
    monkeypatch.setattr("gpuchange.providers.PROVIDERS", PROVIDERS)
    monkeypatch.setattr("gpuchange.engine.Engine", partial(engine.Engine, player=made.play))
    asked = partial(_resolved, resolve)
    monkeypatch.setattr("gpuchange.change.inventory.resolve", asked)
    monkeypatch.setenv("GPUCHANGE_STATE", str(tmp_path / "changes"))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(home)
    return made


def _ask(real: Any, sources: Any, limit: Any, hosts: Any, vault_ids: Any) -> inventory.Inventory:
    found: inventory.Inventory = real(sources, limit, hosts, vault_ids=vault_ids)
    return found


def _resolved(resolve: Any, sources: Any, limit: Any, hosts: Any, *, vault_ids: Any) -> inventory.Inventory:
    found: inventory.Inventory = resolve(tuple(sources), limit, tuple(hosts), tuple(vault_ids))
    return found


def kept() -> list[Path]:
    """The change directories, oldest first."""
    return changes.directories(Path(os.environ["GPUCHANGE_STATE"]))[::-1]


Captured = pytest.CaptureFixture[str]
LOOKING = {"preflight_host", "owner_marker"}
"""Roles that change nothing on a host: the second only gives our own marker back."""


def test_apply_shows_asks_acts_and_sums_up(world: World, capsys: Captured) -> None:
    assert main(["apply", "plan.yaml", "--yes"]) == 0
    out = capsys.readouterr().out
    assert "2 to change, 0 as wanted already" in out
    assert "h1 drain/gpu_users done" in out
    assert "HOST  DRIVER" in out
    assert "done (exit 0)" in out
    assert "most hosts out of service at once: 1" in out
    assert main(["status"]) == 0
    assert ": done, 2 host(s)" in capsys.readouterr().out


def test_a_change_that_did_nothing_is_never_the_one_meant(world: World, capsys: Captured) -> None:
    assert main(["rollback", "--yes"]) == 64
    assert main(["apply", "plan.yaml", "--yes"]) == 0
    world.faults["h2", "preflight_host", "apply"] = ["refused"]
    assert main(["apply", "plan.yaml", "--yes"]) == 7
    first, refused = kept()
    world.faults["h1", "drain_gpu_users", "undo"] = ["failed"]
    assert main(["resume"]) == 64 and refused.name in capsys.readouterr().err  # nothing else is to be resumed; it asks
    assert main(["abort", "--yes"]) == 0
    assert main(["list"]) == 0 and "left as it stands" in capsys.readouterr().out
    assert main(["rollback", "--yes"]) == 6
    assert f"change {first.name}" in capsys.readouterr().err
    assert main(["resume"]) == 6 and first.name in capsys.readouterr().err
    assert main(["resolve", first.name, "h1", "--retry"]) == 0 and main(["resume"]) == 0
    (refused / "journal.db").write_bytes(b"no journal at all")  # a damaged change stops no other one's verb
    assert main(["rollback", "--yes"]) == 64
    assert "no change here did anything that could be taken back" in capsys.readouterr().err


def test_why_a_host_went_back_is_said_at_the_end_and_in_status(world: World, capsys: Captured) -> None:
    world.faults["h1", "verify_host", "apply"] = ["failed"]
    assert main(["apply", "plan.yaml", "--yes"]) == 3
    assert "why h1 went back: h1 verify/host failed: it broke" in capsys.readouterr().out
    assert main(["status"]) == 0
    assert "why h1 went back: h1 verify/host failed: it broke" in capsys.readouterr().out


def test_apply_without_a_terminal_needs_yes_and_touches_nothing(world: World, capsys: Captured) -> None:
    assert main(["apply", "plan.yaml"]) == 64
    assert "add --yes" in capsys.readouterr().err
    assert not {role for _, role, _ in world.ledger} - LOOKING
    assert main(["list"]) == 0
    assert "no change yet" in capsys.readouterr().out


def test_resume_of_a_change_that_was_never_agreed_to_asks(world: World, capsys: Captured) -> None:
    """Ended before the question, by a failed preflight or a kill: the yes is still missing."""
    world.faults["h2", "preflight_host", "apply"] = ["unreachable"]
    assert main(["apply", "plan.yaml", "--yes"]) == 4
    capsys.readouterr()
    assert main(["resume"]) == 64
    said = capsys.readouterr()
    assert "h2" in said.out
    assert "add --yes" in said.err
    assert not {role for _, role, _ in world.ledger} - LOOKING
    assert main(["resume", "--yes"]) == 0
    assert "done (exit 0)" in capsys.readouterr().out


@pytest.mark.case("check-mode-takes-the-other-branch")
@pytest.mark.parametrize("command", [["plan", "plan.yaml"], ["apply", "plan.yaml", "--dry-run"]])
def test_a_dry_run_leaves_no_change_and_acts_on_nothing(world: World, command: list[str], capsys: Captured) -> None:
    assert main(command) == 0
    assert "next:      gpuchange apply plan.yaml" in capsys.readouterr().out
    assert {request.tasks for request in world.requests if request.role not in LOOKING} <= {"probe"}
    assert kept() == []


def test_detailed_exitcode(world: World, capsys: Captured) -> None:
    assert main(["plan", "plan.yaml", "--detailed-exitcode"]) == 2
    world.reports["preflight_host"] = {"as_wanted": True}
    assert main(["plan", "plan.yaml", "--detailed-exitcode"]) == 0


def test_apply_when_all_is_as_wanted_does_nothing(world: World, capsys: Captured) -> None:
    world.reports["preflight_host"] = {"as_wanted": True}
    assert main(["apply", "plan.yaml"]) == 0
    assert "nothing to do" in capsys.readouterr().err
    assert main(["verify", "plan.yaml"]) == 0


def test_verify_says_which_hosts_differ(world: World, capsys: Captured) -> None:
    assert main(["verify", "plan.yaml"]) == 1
    assert "not as the plan wants: h1, h2" in capsys.readouterr().err


def test_json_is_a_version_events_and_a_summary(world: World, capsys: Captured) -> None:
    assert main(["--json", "--yes", "apply", "plan.yaml"]) == 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    kinds = [item["type"] for item in said]
    assert kinds[:2] == ["version", "preview"]
    assert kinds.count("version") == 1
    assert kinds[-1] == "summary"
    assert set(kinds[2:-1]) == {"event"}
    assert said[-1]["exit_code"] == 0
    assert {host["stands"] for host in said[-1]["hosts"]} == {"done"}


def test_a_failed_host_is_taken_back_and_the_next_not_begun(world: World, capsys: Captured) -> None:
    world.faults["h1", "verify_host", "apply"] = ["failed"]
    assert main(["apply", "plan.yaml", "--yes"]) == 3
    out = capsys.readouterr().out
    assert re.search(r"h1 verify/host failed \(\d+ s\): it broke", out)
    assert "h1 goes back: it broke" in out
    assert "rolled back (exit 3)" in out
    assert main(["status"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line[:1] == "h"}
    assert "rolled back" in lines["h1"]
    assert "drain/gpu_users" in lines["h2"]


def test_unreachable_at_the_start_is_exit_4(world: World, capsys: Captured) -> None:
    world.faults["h2", "preflight_host", "apply"] = ["unreachable"] * 2
    assert main(["apply", "plan.yaml", "--yes"]) == 4
    assert "h2 unreachable: no route" in capsys.readouterr().out
    assert not {role for _, role, _ in world.ledger} - LOOKING


def test_rollback_after_success(world: World, capsys: Captured) -> None:
    assert main(["apply", "plan.yaml", "--yes"]) == 0
    assert main(["rollback", "--yes"]) == 0
    assert "rolled back as ordered (exit 0)" in capsys.readouterr().out
    assert main(["rollback", "test", "nobody", "--yes"]) == 64
    assert "not in this change: nobody" in capsys.readouterr().err


def test_a_held_host_is_answered_and_resumed(world: World, capsys: Captured) -> None:
    world.faults["h1", "seal_host", "apply"] = ["silent"]
    world.faults["h1", "seal_host", "probe"] = ["failed"] * 3
    assert main(["apply", "plan.yaml", "--yes"]) == 5
    out = capsys.readouterr().out
    assert "gpuchange resolve" in out
    (directory,) = kept()
    assert main(["resolve", directory.name, "h1", "--done"]) == 0
    assert "gpuchange resume" in capsys.readouterr().out
    assert main(["status"]) == 0
    assert "answered, to be resumed" in capsys.readouterr().out
    assert main(["resume"]) == 0
    assert main(["resolve", directory.name, "h1", "--retry"]) == 5
    assert "not held" in capsys.readouterr().err


@pytest.mark.case("failed-state-turns-into-done")
def test_a_failed_step_stays_failed_until_it_is_verified_anew(world: World, home: Path, capsys: Captured) -> None:
    (home / "hold.yaml").write_text(PLAN + "rollback: {on_failure: hold}\n")
    world.faults["h1", "verify_host", "apply"] = ["failed"]  # once: from now on the host looks healthy
    assert main(["apply", "hold.yaml", "--yes"]) == 5
    played = len([one for one in world.requests if one.role == "verify_host"])
    for _ in range(2):  # neither looking nor a resume without an answer makes failed to done
        capsys.readouterr()
        assert main(["status"]) == 0
        said = capsys.readouterr().out
        assert "h1: h1 verify/host failed: it broke" in said and "h1 --retry | --done | --undo | --leave" in said
        assert main(["resume"]) == 5
    assert len([one for one in world.requests if one.role == "verify_host"]) == played
    (directory,) = kept()
    assert main(["resolve", directory.name, "h1", "--retry"]) == 0 and main(["resume"]) == 0
    again = [one.tasks for one in world.requests if one.role == "verify_host" and "h1" in one.hosts]
    assert again[played:] == ["probe", "apply"]


def test_a_reader_that_goes_away_does_not_stop_a_change(
    world: World, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`apply | head`: what was begun is finished, and the exit code is the change's."""
    write, lost = click.echo, list[str]()

    def echo(text: str, file: Any) -> None:
        if file is sys.stdout and ("drain/gpu_users done" in text or lost):
            lost.append(text)
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        write(text, file=file)

    monkeypatch.setattr(click, "echo", echo)
    monkeypatch.setattr(words, "drop_output", lambda _stream=1: None)
    assert main(["apply", "plan.yaml", "--yes"]) == 0
    assert "the change goes on all the same" in capsys.readouterr().err
    assert {role for _, role, _ in world.ledger} >= {"verify_host", "watch_host"}


def test_a_preview_that_nobody_can_read_is_not_carried_out(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def echo(_text: str, file: Any) -> None:
        if file is sys.stdout:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(click, "echo", echo)
    monkeypatch.setattr(words, "drop_output", lambda _stream=1: None)
    assert main(["apply", "plan.yaml", "--yes"]) == 64
    assert not {role for _, role, _ in world.ledger} - LOOKING


def test_abort_leaves_what_was_not_begun(world: World, capsys: Captured) -> None:
    world.faults["h1", "verify_host", "apply"] = ["failed"]
    assert main(["apply", "plan.yaml", "--yes"]) == 3
    assert main(["abort", "--yes"]) == 0
    assert "left as they are: h2" in capsys.readouterr().out
    assert main(["status"]) == 0
    assert "left as it stands" in capsys.readouterr().out


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_lets_what_runs_finish_and_says_how_to_go_on(
    world: World, capsys: Captured, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    act, sent = world.play, list[int]()
    before = signal.getsignal(signal.SIGINT)  # a background job is started with it ignored
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and under nohup this one is

    def play(request: Any, logs: Path) -> Any:
        if request.role == "seal_host" and request.tasks == "apply" and not sent:
            sent.append(number)
            os.kill(os.getpid(), number)
        return act(request, logs)

    monkeypatch.setattr("gpuchange.engine.Engine", partial(engine.Engine.func, player=play))  # type: ignore[attr-defined]
    assert main(["apply", "plan.yaml", "--yes"]) == code
    shown = capsys.readouterr()
    assert "stopping after what runs now" in shown.err
    assert "next: gpuchange resume" in shown.out
    assert "h1 out of service since" in shown.out
    assert signal.getsignal(signal.SIGINT) is before
    assert main(["resume"]) == 0
    signal.signal(signal.SIGHUP, hangup)


def test_pause_writes_what_the_engine_reads(world: World, capsys: Captured) -> None:
    assert main(["apply", "plan.yaml", "--yes"]) == 0
    assert main(["pause"]) == 0
    assert "starts nothing more" in capsys.readouterr().out


@pytest.mark.case("unreachable-counted-as-success")
def test_a_host_lost_in_the_middle_is_unknown_and_looked_at_first(
    world: World, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuchange.judging.FIRST_BACKOFF", 0.01)
    world.faults["h1", "verify_host", "apply"] = ["unreachable"]
    assert main(["apply", "plan.yaml", "--yes"]) == 0
    assert "h1 verify/host no answer, state unknown: h1 unreachable: no route" in capsys.readouterr().out
    asked = [request.tasks for request in world.requests if request.role == "verify_host" and "h1" in request.hosts]
    assert asked == ["apply", "probe", "apply"]


class Killed(BaseException):
    """kill -9 as far as the engine can tell: it passes every handler."""


class Dying(engine.Engine):
    def close(self) -> None:
        """A killed controller writes nothing more; only the kernel lets its lock go."""
        self.change.journal.close()


@pytest.mark.case("crash-leaves-node-out-of-service")
@pytest.mark.parametrize("acted", [False, True])
def test_killed_at_release_status_names_the_host_and_resume_only_releases(
    world: World, capsys: Captured, monkeypatch: pytest.MonkeyPatch, acted: bool
) -> None:
    act = world.play

    def play(request: Any, logs: Path) -> Any:
        if request.role == "drain_gpu_users" and request.tasks == "undo":
            for host in request.hosts if acted else ():
                world.answer(request, host)
            raise Killed
        return act(request, logs)

    monkeypatch.setattr("gpuchange.engine.Engine", partial(Dying, player=play))
    with pytest.raises(Killed):
        main(["apply", "plan.yaml", "--yes"])
    (directory,), before = kept(), len(world.ledger)
    capsys.readouterr()
    assert main(["status"]) == 0
    out = capsys.readouterr().out
    assert f"{directory.name} (test): cut short, 2 host(s)" in out
    assert re.search(r"h1 out of service since \d\d:\d\d:\d\d by this change \(release/gpu_users\)", out)
    monkeypatch.setattr("gpuchange.engine.Engine", partial(Dying.__base__, player=act))
    assert main(["resume"]) == 0
    since = [(role, what) for host, role, what in world.ledger[before:] if host == "h1" and role not in LOOKING]
    assert since == ([] if acted else [("drain_gpu_users", "undo")]) + [("watch_host", "apply")]
    assert len(world.ledger) == len(set(world.ledger))


@pytest.mark.case("check-mode-takes-the-other-branch")
def test_a_dry_run_asks_every_role_that_apply_plays_and_never_in_check_mode(world: World) -> None:
    assert main(["plan", "plan.yaml"]) == 0
    looked, world.requests = world.requests, []
    assert not world.done - {(host, "preflight_host") for host in ("h1", "h2")}
    assert main(["apply", "plan.yaml", "--yes"]) == 0
    for request in (*looked, *world.requests):
        assert "check" not in request.cmdline and not request.shared.get("ansible_check_mode")
    assert {request.role for request in looked} == {request.role for request in world.requests} - {"owner_marker"}
    assert {request.playbook.name for request in looked} == {request.playbook.name for request in world.requests}


class TestPlain:
    def test_a_wait_is_said_once(self, capsys: Captured) -> None:
        with live.Plain(History()) as plain:
            for _ in range(3):
                event = Event(
                    Kind.AGAIN, "h1", "drain", "x", "do", data={"why": "3 sessions"}, at="2026-11-30T12:00:00Z"
                )
                plain._repeats(event) or plain._print("said")
        assert capsys.readouterr().out == "said\n"

    def test_silence_is_broken_by_a_heartbeat(self, capsys: Captured) -> None:
        with live.Plain(History(), heartbeat_s=0.05) as plain:
            plain._note(Event(Kind.STARTED, "h1", "stack", "apt", "do"))
            plain._over.wait(0.4)
        assert "still at work" in (out := capsys.readouterr().out)
        assert "h1 stack/apt starts" in out
