"""The measuring unit: begun once, attached to, read back; a command's failures; what a result counts for."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import hostcode
import pytest
from ansible.module_utils import gpuchange_child as child
from ansible.module_utils import gpuchange_host as host
from ansible.module_utils import gpuchange_torch as torch
from ansible.module_utils import gpuchange_unit as unit

from gpuchange.waiting import wait_until

STEP = {"phase": "baseline", "provider": "gpu", "direction": "do"}


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for module in (host, unit):
        monkeypatch.setattr(module, "ROOT", str(tmp_path / "gpuchange"))
    monkeypatch.setattr(unit, "_has_systemd", lambda: False)
    return tmp_path


def play(mode: str, argv: list[str] | None = None, **more: Any) -> dict[str, Any]:
    command = {"argv": argv, "warm_ups": 1, "repeats": 3, "timeout_s": 20}
    args = {"command": command if argv else None, "wait_s": 20, **more}
    return dict(hostcode.call("gpuchange_measure", mode=mode, owner=hostcode.OWNER, args=args, step=STEP)["report"])


def counting(folder: Path, tail: str = "") -> list[str]:
    """A benchmark that notes each run and prints its number."""
    runs = folder / "runs"
    return ["/bin/sh", "-c", f'echo >> {runs}; n=$(wc -l < {runs}); echo "{{\\"rate\\": $n}}"; {tail}']


def rates(report: dict[str, Any]) -> list[float]:
    return [json.loads(run["out"])["rate"] for run in report["command"]["runs"]]


def test_the_warm_up_does_not_count_and_a_second_call_reads_the_first_ones_result(root: Path) -> None:
    argv = counting(root)
    first = play("apply", argv)
    assert first["state"] == "done" and rates(first) == [2, 3, 4]
    assert rates(play("apply", argv)) == [2, 3, 4] == rates(play("probe", argv))


def test_a_probe_before_finds_nothing_and_leaves_nothing(root: Path) -> None:
    assert play("probe", counting(root))["state"] == "not_done"
    assert not (root / "gpuchange").exists()


def test_long_work_is_attached_to_and_tells_how_far_it_is(root: Path) -> None:
    argv = counting(root, "while [ ! -e %s ]; do sleep 0.05; done" % (root / "go"))
    first = play("apply", argv, wait_s=1)
    assert first["state"] == "running" and first["why"].startswith("benchmark command, run 1 of 4"), first
    assert play("probe", argv)["state"] == "running"
    (root / "go").touch()
    assert rates(play("apply", argv)) == [2, 3, 4]


def test_a_retry_other_arguments_and_another_boot_measure_anew(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = counting(root)
    play("apply", argv)
    assert rates(play("apply", argv, generation=1)) == [6, 7, 8]
    assert play("probe", [*argv, "other"], generation=1)["state"] == "not_done"
    kept = root / "gpuchange" / "c1" / "baseline-measure.job"
    kept.write_text(kept.read_text().replace(host.boot_id(), "another-boot"))
    assert play("probe", argv, generation=1)["state"] == "not_done"
    assert rates(play("apply", argv, generation=1)) == [10, 11, 12]


def test_work_that_is_lost_again_and_again_is_given_up(root: Path) -> None:
    """A host that restarts under its own benchmark must not do so for ever."""
    argv = counting(root)
    said = ""
    for _ in range(4):
        folder = root / "gpuchange" / "c1"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "baseline-do-measure.json").unlink(missing_ok=True)
        (folder / "baseline-measure.result").unlink(missing_ok=True)
        begun = {"pid": 1, "start_time": "0", "boot_id": "gone", "started": "x"}
        (folder / "baseline-do-measure.begun").write_text(json.dumps(begun))
        said = play("apply", argv).get("why", "")
    assert "cut short 3 times" in said


def test_going_back_ends_what_is_still_measured(root: Path) -> None:
    measuring = importlib.import_module("ansible.module_utils.gpuchange_measuring")
    argv = counting(root, "sleep 0.3")
    assert play("apply", argv, wait_s=0)["state"] == "running"
    wait_until((root / "runs").exists, timeout=20, what="the first run")
    module = type("Module", (), {"params": {"owner": hostcode.OWNER}})()
    assert measuring.end_measuring(module) == ""
    runs = len((root / "runs").read_text())
    assert runs < 4, "it went on to the end"
    assert play("probe", argv)["why"].startswith("the measuring program ended with 1: it was told to end")
    assert measuring.end_measuring(module) == ""  # twice is once


def test_a_command_that_fails_is_not_run_again_and_its_words_are_kept(root: Path) -> None:
    report = play("apply", counting(root, "echo no memory >&2; exit 3"))
    (run,) = report["command"]["runs"]
    assert run["rc"] == 3 and run["err"].strip() == "no memory"


def test_a_command_that_is_not_there_is_said() -> None:
    (run,) = play("apply", ["no-such-benchmark"])["command"]["runs"]
    assert run["rc"] is None and "not installed" in run["err"]


def test_nothing_asked_for_is_done_at_once_and_touches_nothing(root: Path) -> None:
    assert play("apply")["state"] == "done"
    assert not (root / "gpuchange").exists()


def test_the_unit_works_without_ansible_on_its_path(root: Path) -> None:
    """What the unit imports is what was laid beside it, and no more than Python's own library."""
    began = time.monotonic()
    report = play("apply", counting(root))
    assert report["state"] == "done", report
    folder = root / "gpuchange" / "c1" / "measure-lib" / "ansible" / "module_utils"
    assert {path.name for path in folder.glob("gpuchange_*.py")} >= {"gpuchange_stress.py", "gpuchange_bench.py"}
    assert not any("ansible.module_utils.basic" in path.read_text() for path in folder.glob("gpuchange_*.py"))
    assert time.monotonic() - began < 60


def test_python_without_torch_is_said_and_not_used() -> None:
    found = torch.look(sys.executable)
    if found["load"] != "built-in":
        pytest.skip("this Python has a PyTorch that sees cards")
    assert found["why"].startswith("PyTorch")
    assert torch.nccl(found, 8, lambda _text: None) is None


@pytest.fixture(scope="module")
def with_torch() -> str:
    """An interpreter that has PyTorch, with or without cards."""
    python = os.environ.get("GPUCHANGE_TEST_TORCH") or sys.executable
    if subprocess.run([python, "-c", "import torch"], capture_output=True, check=False).returncode:
        pytest.skip("no PyTorch here; GPUCHANGE_TEST_TORCH may name a Python that has it")
    return python


def test_torch_carries_the_load_and_speaks_as_our_own_children_do(with_torch: str) -> None:
    pid, reader = torch.start({"python": with_torch}, 0, 1.0, device="cpu", size=128)
    data = b"".join(iter(lambda: os.read(reader, 65536), b""))
    os.close(reader)
    said = child.conclude(pid, child.parse(data), True, 5)
    assert said["ok"] and said["rounds"] > 0, said


def test_an_all_reduce_is_right_on_every_rank(with_torch: str) -> None:
    assert torch.collective(with_torch, "gloo", 2) == {"ok": True, "why": ""}


def test_an_all_reduce_that_cannot_be_is_said(with_torch: str) -> None:
    said = torch.collective(with_torch, "no-such-backend", 2)
    assert not said["ok"] and said["why"]
