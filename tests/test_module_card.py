"""What runs for a card change on host and controller: knocking, finding names of cards, deciding to power off."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import hostcode
import pytest
from ansible.module_utils import gpuchange_host as host
from ansible.module_utils import gpuchange_references as found_in
from hostcode import OWNER, call

SLOT = "0000:1b:00.0"
XML = """<nvidia_smi_log>
<gpu id="00000000:1B:00.0"><serial>161</serial><uuid>GPU-aa</uuid></gpu>
<gpu id="00000000:43:00.0"><serial>N/A</serial><uuid>GPU-bb</uuid></gpu>
</nvidia_smi_log>"""
UNREACHED = "ssh: connect to host 10.0.0.1 port 22: No route to host"


def program(folder: Path, name: str, *, rc: int = 0, out: str = "", err: str = "") -> Path:
    """A program of that name that says this and ends so; it writes its arguments beside itself."""
    path = folder / name
    path.write_text(
        f"#!/bin/sh\necho \"$*\" >> {path}.args\nprintf '%s\\n' '{out}'\nprintf '%s\\n' '{err}' >&2\nexit {rc}\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH that begins with ours; the ssh and ping in it find nobody."""
    monkeypatch.setitem(host.CLEAN_ENV, "PATH", f"{tmp_path}:{host.CLEAN_ENV['PATH']}")
    monkeypatch.setenv("PATH", f"{tmp_path}:{host.CLEAN_ENV['PATH']}")
    program(tmp_path, "ssh", rc=255, err=UNREACHED)
    program(tmp_path, "ping", rc=1)
    return tmp_path


def knocked(**args: Any) -> dict[str, Any]:
    way = {"host": "10.0.0.1", "port": 2222, "user": "ops", "key": "/k", "common": "-o ProxyJump='a b'", "extra": ""}
    said = call("gpuchange_knock", mode="probe", owner=OWNER, args={"expected": True, "way": way, **args})
    return dict(said["report"])


def test_a_silent_host_is_away_after_the_whole_window(tools: Path) -> None:
    said = knocked(window=1)
    assert (said["stage"], said["aside"]) == ("away", True)
    assert said["heard"][:2] == [f"ssh: no answer ({UNREACHED})", "ping: no answer"]
    asked = (tools / "ssh.args").read_text().splitlines()
    assert len(asked) >= 2
    assert asked[0].endswith("-o ProxyJump=a b -p 2222 -l ops -i /k -- 10.0.0.1 true")


@pytest.mark.parametrize(
    ("rc", "err", "stage"),
    [
        (0, "", "here"),
        (255, "ops@10.0.0.1: Permission denied (publickey).", "here"),
        (255, "Host key verification failed.", "here"),
        (255, "ssh: connect to host 10.0.0.1 port 22: Connection refused", "doubtful"),
        (255, "Connection timed out during banner exchange", "doubtful"),
        (255, "kex_exchange_identification: Connection closed by 10.0.0.1 port 22", "doubtful"),
        (255, "kex_exchange_identification: Connection closed by UNKNOWN port 65535", "away"),
        (255, "ssh: connect to host 10.0.0.1 port 22: Connection timed out", "away"),
    ],
)
@pytest.mark.case("bmc-says-success-host-still-on")
def test_what_ssh_says_tells_a_running_machine_from_none(tools: Path, rc: int, err: str, stage: str) -> None:
    program(tools, "ssh", rc=rc, err=err)
    assert knocked()["stage"] == stage


@pytest.mark.case("bmc-says-success-host-still-on")
@pytest.mark.parametrize(
    ("rc", "out", "stage"),
    [
        (0, "Chassis Power is off", "away"),
        (0, '"PowerState": "Off"', "away"),
        (0, "Chassis Power is on", "doubtful"),
        (0, "PoweringOff", "doubtful"),
        (0, "", "doubtful"),
        (1, "Chassis Power is off", "doubtful"),
    ],
)
def test_the_plans_own_command_must_say_off(tools: Path, rc: int, out: str, stage: str) -> None:
    bmc = program(tools, "bmc", rc=rc, out=out)
    said = knocked(power_status=[str(bmc), "status"])
    assert said["stage"] == stage
    assert any(line.startswith("bmc: ") for line in said["heard"])


def test_a_host_that_answers_pings_is_not_off(tools: Path) -> None:
    program(tools, "ping")
    said = knocked(window=5)
    assert (said["stage"], said["heard"][1]) == ("doubtful", "ping: answers")


def test_nobody_knocks_at_a_host_that_was_never_told_to_go(tools: Path) -> None:
    assert knocked(expected=False)["aside"] is False
    assert not (tools / "ssh.args").exists()


# ------------------------------------------------------------------------------------------------------ references


def test_names_of_cards_are_found_by_file_and_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(found_in, "PLACES", (f"{tmp_path}/etc/**/*.conf", f"{tmp_path}/etc/default/*"))
    monkeypatch.setattr(found_in, "HOMES", (f"{tmp_path}/srv/*",))
    for name, text in {
        "etc/slurm/gres.conf": "# old\nName=gpu File=/dev/nvidia0 # GPU-aabbccdd-1\n",
        "etc/systemd/system/m.service.d/x.conf": "[Service]\nEnvironment=CUDA_VISIBLE_DEVICES=GPU-1234,GPU-5678\n",
        "etc/default/model": "NVIDIA_VISIBLE_DEVICES=all\n",
        "srv/app/compose.yaml": "device_ids: ['GPU-aabbccdd-1']\n",
        "more/a/b.txt": "GPU-ffff\nGPU-\nMY-GPU-eeee\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "etc/default/link").symlink_to(tmp_path / "etc/slurm/gres.conf")
    rows = [(row["name"], str(Path(row["file"]).relative_to(tmp_path)), row["line"]) for row in
            found_in.references([str(tmp_path / "more")])]  # fmt: skip
    assert rows[:4] == [
        ("GPU-aabbccdd-1", "etc/slurm/gres.conf", 2),
        ("GPU-1234", "etc/systemd/system/m.service.d/x.conf", 2),
        ("GPU-5678", "etc/systemd/system/m.service.d/x.conf", 2),
        ("GPU-aabbccdd-1", "srv/app/compose.yaml", 1),
    ]
    assert ("GPU-ffff", "more/a/b.txt", 1) in rows


def test_what_is_huge_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"GPU-aabb\n" + b"x" * (2 << 20))
    assert [row for row in found_in.references([str(tmp_path / "big")]) if "big" in row["file"]] == []


# ------------------------------------------------------------------------------------------------ the host's module


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """This machine as a host with two cards whose power-off is only written down."""
    world: dict[str, Any] = {"ordered": 0, "boot": "b0", "xml": XML}
    monkeypatch.setattr(host, "ROOT", str(tmp_path / "lib"))
    module = hostcode.library("gpuchange_card")
    monkeypatch.setattr(hostcode, "library", lambda _name: module)
    monkeypatch.setattr(module, "boot_id", lambda: world["boot"])
    monkeypatch.setattr(module.gpu, "smi", lambda _deadline: {"rc": 0, "out": world["xml"], "err": ""})
    monkeypatch.setattr(module, "references", lambda _more: [])

    def unit(*_: Any, **__: Any) -> dict[str, Any]:
        world["ordered"] += 1
        return {"state": "running"}

    monkeypatch.setattr(module, "host_unit", unit)
    return world


GOAL = [{"slot": SLOT, "serial": "999", "other_than": "GPU-aa"}]


def card(mode: str = "apply", direction: str = "do", **args: Any) -> dict[str, Any]:
    step = {"phase": "change", "provider": "manual", "direction": direction}
    return dict(call("gpuchange_card", mode=mode, owner=OWNER, args={"goal": GOAL, **args}, step=step)["report"])


def test_the_host_is_powered_off_once_and_looked_at_when_it_comes_back(machine: dict[str, Any]) -> None:
    assert card("probe")["state"] == "not_done" and machine["ordered"] == 0
    said = card()
    assert (said["state"], said["stage"], said["ordered_boot"]) == ("running", "ordered", "b0")
    assert card()["stage"] == "ordered"
    machine.update(boot="b1")
    before = machine["ordered"]
    for mode in ("apply", "probe"):
        said = card(mode)
        assert (said["state"], said["stage"], said["ordered_boot"]) == ("done", "looked", "b0")
    assert machine["ordered"] == before


@pytest.mark.parametrize(
    ("goal", "there"),
    [
        ([{"slot": SLOT, "serial": "161"}], True),
        ([{"slot": SLOT, "uuid": "GPU-aa", "serial": "161"}], True),
        ([{"slot": SLOT, "other_than": "GPU-zz"}], True),
        ([{"slot": SLOT, "other_than": "GPU-aa"}], False),
        ([{"slot": SLOT}], False),
        ([{"slot": "0000:99:00.0", "serial": "161"}], False),
        ([], True),
    ],
)
def test_cards_that_are_in_place_need_no_hands(machine: dict[str, Any], goal: Any, there: bool) -> None:
    assert card("probe", goal=goal)["state"] == ("done" if there else "not_done")
    assert card(goal=goal)["state"] == ("done" if there else "running")
    assert machine["ordered"] == (0 if there else 1)


def test_after_the_confirmation_it_never_powers_off(machine: dict[str, Any]) -> None:
    assert card(confirmed=True)["state"] == "done"
    assert machine["ordered"] == 0


def test_the_way_back_has_an_order_of_its_own(machine: dict[str, Any]) -> None:
    card()
    machine.update(boot="b1")
    said = card("undo", "undo", goal=[{"slot": SLOT, "serial": "42"}])
    assert (said["stage"], said["ordered_boot"]) == ("ordered", "b1")


def test_preflight_says_whether_the_coming_cards_are_there(machine: dict[str, Any]) -> None:
    looking = {"goal": [], "confirmed": True}
    assert card("probe", arrived=["161", "GPU-bb"], **looking)["as_wanted"] is True
    assert card("probe", arrived=["161", "7"], **looking)["as_wanted"] is False
    assert card("probe", arrived=None, **looking)["as_wanted"] is False
    assert "as_wanted" not in card("probe", **looking)


def test_what_the_controller_heard_is_passed_on_and_nothing_is_done(machine: dict[str, Any]) -> None:
    said = card(knock={"aside": True, "stage": "away", "heard": ["ssh: no answer"]})
    assert (said["state"], said["stage"], said["heard"]) == ("running", "away", ["ssh: no answer"])
    assert machine["ordered"] == 0


def test_a_mig_devices_uuid_is_not_taken_for_its_cards() -> None:
    device = "<mig_devices><mig_device><uuid>MIG-1</uuid></mig_device></mig_devices>"
    text = f'<gpu id="00000002:81:00.0">{device}<serial>7</serial><uuid>GPU-a</uuid></gpu>'
    assert hostcode.library("gpuchange_card").cards(text) == {"0002:81:00.0": {"uuid": "GPU-a", "serial": "7"}}
