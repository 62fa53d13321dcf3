"""Looking at a host: bounded, never waiting for what hangs, and every collector on this very machine."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import hostcode
import pytest
from ansible.module_utils import (
    gpuchange_facts_gpu as gpu,
)
from ansible.module_utils import (
    gpuchange_facts_host as host_facts,
)
from ansible.module_utils import (
    gpuchange_gpu_users as users,
)
from ansible.module_utils import (
    gpuchange_host as host,
)
from ansible.module_utils import (
    gpuchange_look as look,
)
from ansible.module_utils import (
    gpuchange_unit as unit,
)
from hostcode import OWNER

STEP = {"phase": "record", "provider": "host", "direction": "do"}


def test_a_command_that_hangs_is_reported_not_waited_for() -> None:
    began = time.monotonic()
    said = look.run(["sleep", "60"], deadline_s=0.2)
    assert time.monotonic() - began < 5
    assert said["hung"] and said["rc"] is None


def test_a_talkative_command_is_cut_and_says_so() -> None:
    said = look.run(["head", "-c", "5000000", "/dev/zero"], limit=1000)
    assert (said["rc"], len(said["out"]), said["cut"]) == (0, 1000, True)


@pytest.mark.case("locale-changes-the-output")
def test_commands_speak_english_whatever_the_caller_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANG", "de_DE.UTF-8")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    said = look.run(["env"])
    assert "LC_ALL=C.UTF-8" in said["out"] and "de_DE" not in said["out"]


def test_a_missing_command_is_told_from_a_failing_one() -> None:
    assert look.run(["no-such-command"])["err"] == "no-such-command: not installed"
    assert look.run(["false"])["rc"] == 1


def test_reading_never_blocks_and_never_grows(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert look.read_text(str(tmp_path / "fifo")) == ""
    assert look.read_text(str(tmp_path / "nothing")) == ""
    assert len(look.read_bytes("/dev/zero", 1000)) == 1000


def test_every_hop_of_a_link(tmp_path: Path) -> None:
    (tmp_path / "cuda-12.4").mkdir()
    (tmp_path / "alternative").symlink_to("cuda-12.4")
    (tmp_path / "cuda").symlink_to(tmp_path / "alternative")
    assert [Path(hop).name for hop in look.link_hops(str(tmp_path / "cuda"))] == ["cuda", "alternative", "cuda-12.4"]
    (tmp_path / "round").symlink_to("round")
    assert len(look.link_hops(str(tmp_path / "round"))) == 16


def test_who_holds_a_device_is_found_by_its_open_handle(tmp_path: Path) -> None:
    device = tmp_path / "nvidia0"
    device.touch()
    with open(device):
        found = [row for row in users.scan(devices=(str(tmp_path),)) if row["pid"] == os.getpid()]
    assert found and found[0]["devices"] == [str(device)] and found[0]["comm"]
    assert not any(row["pid"] == os.getpid() for row in users.scan(devices=(str(tmp_path),)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0::/system.slice/modelserver.service\n", "modelserver.service"),
        ("0::/user.slice/user-0.slice/session-3.scope\n", "session-3.scope"),
        ("12:cpu:/x.service\n1:name=systemd:/system.slice/docker-abc.scope\n", "docker-abc.scope"),
        ("0::/\n", ""),
        ("", ""),
    ],
)
def test_the_unit_of_a_process(text: str, expected: str) -> None:
    assert users.unit_of(text) == expected


def test_space_and_paths_of_what_is_and_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    space = host_facts.space([str(tmp_path / "not" / "yet")])
    assert space[str(tmp_path / "not" / "yet")]["on"] == str(tmp_path)
    assert space[str(tmp_path / "not" / "yet")]["free"] > 0
    paths = host_facts.paths([str(tmp_path / "empty"), str(tmp_path / "no"), "/proc"])
    assert paths[str(tmp_path / "empty")]["empty"] is True
    assert paths[str(tmp_path / "no")]["kind"] == ""
    assert paths["/proc"]["is_mount"] and paths["/proc"]["filesystem"]["type"] == "proc"


def test_unit_states_are_read_by_name() -> None:
    name, state = host_facts._unit(
        "Id=a.service\nLoadState=loaded\nActiveState=active\nSubState=running\nUnitFileState="
    )
    assert (name, state) == ("a.service", {"load": "loaded", "active": "active", "sub": "running", "enabled": ""})


def test_modinfo_records_keep_the_first_of_repeated_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "filename:       /lib/modules/k/updates/dkms/nvidia.ko\nalias: a\nalias: b\nversion:        550.54.15\n" * 2
    monkeypatch.setattr(gpu, "run", lambda *_: {"out": text, "err": "", "rc": 0, "cut": False})
    assert (
        gpu._modinfo(["x"])
        == [{"filename": "/lib/modules/k/updates/dkms/nvidia.ko", "alias": "a", "version": "550.54.15"}] * 2
    )


def test_the_kernel_says_whether_the_clock_is_set() -> None:
    assert host_facts.clock()["synchronized"] in ("yes", "no")


def test_supported_clocks_are_cut_out(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "<gpu><supported_clocks>\n<x/>\n</supported_clocks><uuid>u</uuid></gpu>"
    monkeypatch.setattr(gpu, "run", lambda *_: {"out": text, "err": "", "rc": 0, "cut": False})
    assert gpu.smi()["out"] == "<gpu><uuid>u</uuid></gpu>"


def test_a_link_that_leads_nowhere_is_no_copy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "libcudnn.so.8.9.7").touch()
    (tmp_path / "libcudnn.so.8").symlink_to("libcudnn.so.8.9.7")
    (tmp_path / "libcudnn.so.5").symlink_to("libcudnn.so.5.1.10")
    monkeypatch.setattr(gpu, "LIBRARIES", (str(tmp_path),))
    monkeypatch.setattr(gpu, "run", lambda *_: {"out": ""})
    assert {Path(row["real"]).name for row in gpu.libraries("libcudnn")} == {"libcudnn.so.8.9.7"}


def test_one_dead_card_has_the_others_asked_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    dead = {"rc": 255, "out": "Unable to determine the device handle for GPU 0000:0B:00.0", "err": "", "cut": False}
    asked: list[list[str]] = []

    def run(argv: list[str], *_: Any) -> dict[str, Any]:
        asked.append(argv)
        return dict(dead)

    monkeypatch.setattr(gpu, "run", run)
    monkeypatch.setattr(gpu, "pci", lambda: [{"address": f"0000:{b}:00.0", "class": "0x030200"} for b in ("0b", "1b")])
    assert list(gpu.smi()["each"]) == ["0000:0b:00.0", "0000:1b:00.0"]
    assert asked[-1] == ["nvidia-smi", "-q", "-x", "-i", "0000:1B:00.0"]


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for where in (host, unit):
        monkeypatch.setattr(where, "ROOT", str(tmp_path / "state"))
    monkeypatch.setattr(unit, "_has_systemd", lambda: False)
    return tmp_path / "state"


def facts(mode: str, **args: Any) -> dict[str, Any]:
    return hostcode.call("gpuchange_facts", mode=mode, owner=OWNER, args=args, step=STEP)


def test_a_probe_leaves_no_trace(state: Path, tmp_path: Path) -> None:
    said = facts("probe", paths=[str(tmp_path)], manifest={"name": "record", "paths": [str(tmp_path)]}, function=True)
    assert said["report"]["state"] == "not_done" and said["report"]["facts"]["machine_id"] is not None
    assert said["report"]["errors"] == {}
    assert not state.exists()


def test_everything_is_collected_with_its_manifest(state: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "x").write_text("x")
    wanted = {"name": "record", "paths": [str(data)], "previous": ["record"]}
    report = facts("apply", paths=[str(data)], manifest=wanted)["report"]
    assert report["state"] == "done" and report["errors"] == {}
    assert report["manifest"]["files"] == 1
    assert set(report["facts"]) >= {
        "kernel",
        "packages",
        "smi",
        "loaded",
        "on_disk",
        "cuda",
        "cudnn",
        "gpu_users",
        "space",
    }
    again = facts("apply", paths=[str(data)], manifest=wanted)["report"]  # asked again, it looks again
    (data / "y").write_text("y")
    assert facts("apply", manifest=wanted)["report"]["manifest"]["files"] == 2
    assert again["manifest"]["files"] == 1


def test_a_manifest_that_cannot_be_made_is_unknown_with_its_reason(state: Path) -> None:
    report = facts("apply", manifest={"name": "record", "paths": ["/nowhere/at/all"]})["report"]
    assert report["state"] == "unknown" and "/nowhere/at/all" in report["why"]


def test_another_changes_host_is_refused(state: Path) -> None:
    state.mkdir()
    host.write_atomic(str(state / "owner.json"), {"change": "another", "controller": "k2", "fence": 3})
    assert facts("apply", guard=True)["refused"]["by"]["change"] == "another"
    assert facts("apply", manifest={"name": "record", "paths": ["/etc"]})["refused"]["kind"] == "locked"


def test_a_collector_that_fails_costs_its_own_fact_only(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise OSError("bus error")

    monkeypatch.setattr(gpu, "pci", broken)
    report = facts("apply")["report"]
    assert report["errors"] == {"pci": "OSError: bus error"} and "smi" in report["facts"]


@pytest.mark.parametrize(("value", "on"), [(b"\6\0\0\0\1", True), (b"\6\0\0\0\0", False), (b"\6\0", None)])
def test_secure_boot_is_the_firmwares_own_word(tmp_path: Path, value: bytes, on: bool | None) -> None:
    assert host_facts.secure_boot(str(tmp_path)) is None
    (tmp_path / "SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c").write_bytes(value)
    assert host_facts.secure_boot(str(tmp_path)) is on
