"""Host units without systemd: once only, attach, result file, lost."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import hostcode
import pytest
from ansible.module_utils import gpuchange_host as host
from ansible.module_utils import gpuchange_unit as unit
from hostcode import OWNER
from waiting import eventually


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    for where in (host, unit):
        monkeypatch.setattr(where, "ROOT", str(tmp_path))
    monkeypatch.setattr(unit, "_has_systemd", lambda: False)
    hostcode.set_arguments(mode="apply", owner=OWNER, step={"phase": "stack", "provider": "apt", "direction": "do"})
    return host.open_module()


def test_runs_once_and_answers_from_its_result(module: Any, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    argv = ["sh", "-c", f"echo acted >> {ledger}; echo said; exit 3"]
    first = unit.host_unit(module, "install", argv, wait_s=10)
    assert (first["state"], first["rc"], first["out"]) == ("finished", 3, "said\n")
    assert first["boot_id"] == first["started_boot"] == host.boot_id()
    assert unit.host_unit(module, "install", argv, wait_s=10) == first
    assert ledger.read_text() == "acted\n"
    assert unit.host_unit(module, "install", argv, wait_s=10, generation=1)["rc"] == 3
    assert ledger.read_text() == "acted\nacted\n"


@pytest.mark.case("async-job-file-vanishes")
def test_nothing_below_a_home_directory_is_needed_to_find_it_again(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    argv = ["sh", "-c", f"while [ ! -e {gate} ]; do sleep 0.05; done; echo whole"]
    monkeypatch.setenv("HOME", str(tmp_path / "one"))
    assert unit.host_unit(module, "install", argv, wait_s=0.1)["state"] == "running"
    monkeypatch.setenv("HOME", "/nowhere")  # another user, a swept home directory, a new connection
    gate.touch()
    found = unit.host_unit(module, "install", ["false"], wait_s=10)
    assert (found["unit"], found["rc"], found["out"]) == ("gpuchange-c1-stack-do-install.service", 0, "whole\n")
    assert not (tmp_path / "one").exists()


def test_attaches_to_what_runs(module: Any, tmp_path: Path) -> None:
    """Case: async-job-file-vanishes."""
    gate, ledger = tmp_path / "gate", tmp_path / "ledger"
    argv = ["sh", "-c", f"echo acted >> {ledger}; while [ ! -e {gate} ]; do sleep 0.05; done"]
    assert unit.host_unit(module, "install", argv, wait_s=0.1)["state"] == "running"
    assert unit.host_unit(module, "install", argv, wait_s=0.1)["state"] == "running"
    gate.touch()
    assert unit.host_unit(module, "install", argv, wait_s=10)["rc"] == 0
    assert ledger.read_text() == "acted\n"


@pytest.mark.case("async-job-file-vanishes")
def test_a_killed_runner_is_lost_and_not_started_again(module: Any, tmp_path: Path) -> None:
    """Case: async-job-file-vanishes."""
    ledger = tmp_path / "ledger"
    argv = ["sh", "-c", f"echo $$ >> {ledger}; exec sleep 60"]
    unit.host_unit(module, "install", argv, wait_s=0.1)
    eventually(lambda: ledger.exists() and ledger.read_text().endswith("\n"))
    name = unit.unit_name(module, "install")
    os.kill(host.read_json(name.begun)["pid"], signal.SIGKILL)
    os.kill(int(ledger.read_text()), signal.SIGKILL)
    eventually(lambda: unit.unit_state(name)["state"] == "lost")
    assert unit.host_unit(module, "install", argv, wait_s=1)["state"] == "lost"
    assert len(ledger.read_text().splitlines()) == 1


def test_a_unit_of_an_earlier_boot_is_lost(module: Any) -> None:
    name = unit.unit_name(module, "reboot")
    host.save_once(name.begun, {"pid": os.getpid(), "start_time": "1", "boot_id": "another-boot"})
    found = unit.unit_state(name)
    assert (found["state"], found["started_boot"]) == ("lost", "another-boot")


def test_a_deadline_ends_the_command_and_says_so(module: Any) -> None:
    found = unit.host_unit(module, "install", ["sh", "-c", "echo waits; exec sleep 60"], wait_s=15, deadline_s=0.3)
    assert (found["rc"], found["timed_out"], found["out"]) == (124, True, "waits\n")


def test_a_daemon_left_behind_does_not_hold_the_result(module: Any, tmp_path: Path) -> None:
    argv = ["sh", "-c", f"sleep 30 & echo $! > {tmp_path}/daemon; echo done"]
    found = unit.host_unit(module, "install", argv, wait_s=10)
    os.kill(int((tmp_path / "daemon").read_text()), signal.SIGKILL)
    assert (found["rc"], found["out"]) == (0, "done\n")


def test_output_is_bounded_and_not_a_prompt(module: Any) -> None:
    found = unit.host_unit(module, "install", ["sh", "-c", "read x; echo rc=$?; seq 1 100000"], wait_s=10)
    assert len(found["out"]) <= 16 * 1024 and found["out"].endswith("100000\n")


def test_a_missing_program_is_a_result(module: Any) -> None:
    found = unit.host_unit(module, "install", ["/no/such/program"], wait_s=10)
    assert found["rc"] == 127 and "No such file" in found["out"]


def test_names_say_direction_and_have_no_attempt(module: Any) -> None:
    name = unit.unit_name(module, "install")
    assert name.unit == "gpuchange-c1-stack-do-install.service"
    assert unit.UnitName("c1", "stack", "undo", "reboot", 2).stem == "stack-undo-reboot-g2"
    with pytest.raises(ValueError):
        unit.unit_name(module, "../x")


def test_a_damaged_result_is_no_result(module: Any, tmp_path: Path) -> None:
    name = unit.unit_name(module, "install")
    Path(host.state_dir("c1"), name.stem + ".json").write_text("{")
    assert unit.unit_state(name)["state"] == "absent"
    assert json.dumps(unit.unit_state(name))
