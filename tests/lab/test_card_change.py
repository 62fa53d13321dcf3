"""A card changed by hand on a real host: asked for when it is off, confirmed, checked, held, resumed, taken back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from changes import Operator, boot_id

from gpuchange.errors import LabError
from gpuchange.lab import Host, Lab, cards
from gpuchange.states import Event, Kind
from gpuchange.waiting import wait_until

NEW, WRONG = "1650000000001", "777"
SLOT, BUS = "0000:1b:00.0", "1b"
DOCKER = "/etc/docker/daemon.json"
DROP_IN = "/etc/systemd/system/modelserver.service.d/card.conf"


def swap(host: Host, serial: str, **odd: Any) -> None:
    """The hands: with the power off, one card out and one in; then power on."""
    assert host.status()["power"] == "off", "hands were asked for on a host that is on"
    cards.pull(host, BUS)
    cards.put(host, BUS, serial, **odd)
    power_on(host)


def power_on(host: Host) -> None:
    host.power("on")
    host.wait_ready()


def manual(old: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"provider": "manual", "cards": [{"goes": old["serial"], "comes": {"serial": NEW}}], "off_for": "3s", **more}


def begin(operator: Operator, entry: dict[str, Any]) -> subprocess.Popen[str]:
    plan = operator.plan(hosts=["gpu1"], stack=None, baseline={"mode": "skip"}, record=None, change=[entry])
    return operator.start("apply", plan, "--yes")


def asked(operator: Operator, process: subprocess.Popen[str], direction: str = "do") -> Event:
    """Wait for the question; when gpuchange ends without it, everything that it said is told."""

    def ended_or_asked(event: Event) -> bool:
        assert process.poll() is None, operator.finish(process).text
        return bool(event.data.get("asks")) and event.direction == direction

    return operator.await_event(ended_or_asked, "the question", 300)


def held(operator: Operator) -> str:
    """Why the host was held last."""
    return str([e for e in operator.events() if e.kind is Kind.HELD][-1].data["why"])


def controller(operator: Operator) -> int:
    return int(json.loads((operator.change() / "lock").read_text())["pid"])


def retried(operator: Operator, code: int) -> None:
    operator.run("resolve", operator.change().name, "gpu1", "--retry").ended(0)
    operator.run("resume", "--yes").ended(code)


@pytest.mark.timeout(900)
@pytest.mark.case(
    "swapped-card-leaves-dead-uuid-in-configs", "bmc-says-success-host-still-on", "gpu-short-after-reboot-node-returned"
)
def test_a_card_is_changed_by_hand_through_a_killed_controller_wrong_cards_and_back(
    fresh_hosts: Lab, tmp_path: Path
) -> None:
    operator, host = Operator(fresh_hosts, tmp_path), fresh_hosts.host("gpu1")
    old = cards.cards(host)[0]
    names_the_old_card(host, old["uuid"])
    booted = boot_id(host)

    asked_then_killed(operator, host, old)
    swap(host, WRONG, link_width=8)
    operator.run("confirm", operator.change().name, "gpu1").ended(0)
    operator.run("resume", "--yes").ended(5)
    assert f"slot {SLOT} holds the wrong card" in held(operator) and f"serial {WRONG}, expected {NEW}" in held(operator)
    assert "is x8, expected x16" in held(operator)
    missing_then_stale(operator, host, old)
    new = cards.cards(host)[0]
    rename(host, old["uuid"], new["uuid"])
    retried(operator, 0)
    assert new["serial"] == NEW
    assert boot_id(host) != booted
    fresh_hosts.wait_serving()
    taken_back(operator, host, old, new)


def asked_then_killed(operator: Operator, host: Host, old: dict[str, Any]) -> None:
    """The controller dies by SIGKILL while it waits for the confirmation."""
    process = begin(operator, manual(old))
    question = asked(operator, process)
    assert host.status()["power"] == "off"
    told = "\n".join(question.data["asks"])
    assert f"slot {SLOT}: serial {old['serial']} ({old['uuid']}" in told and f"serial {NEW}" in told
    os.kill(controller(operator), signal.SIGKILL)
    said = operator.finish(process)
    assert f"the card that goes is named in {DOCKER}:2" in said.out, "said before anything moved"


def missing_then_stale(operator: Operator, host: Host, old: dict[str, Any]) -> None:
    """No card at all, then the right one while files still name the old one."""
    host.power("off")
    cards.pull(host, BUS)
    power_on(host)
    retried(operator, 5)
    assert f"slot {SLOT} has no working card (it is not on the PCI bus)" in held(operator)
    host.power("off")
    cards.put(host, BUS, NEW)
    power_on(host)
    retried(operator, 5)
    assert f"old UUID still referenced in {DOCKER}:2 ({old['uuid']})" in held(operator)
    assert f"{DROP_IN}:2 ({old['uuid'][:12]})" in held(operator), "a UUID cut short names the card too"


def names_the_old_card(host: Host, uuid: str) -> None:
    """A container runtime and a unit's drop-in that want this very card."""
    host.run(["mkdir", "-p", str(Path(DOCKER).parent), str(Path(DROP_IN).parent)])
    host.run(["tee", DOCKER], stdin=f'{{\n "device": "{uuid}"\n}}\n')
    host.run(["tee", DROP_IN], stdin=f"[Service]\nEnvironment=NVIDIA_VISIBLE_DEVICES={uuid[:12]}\n")


def rename(host: Host, was: str, now: str) -> None:
    """What the operator does about files that name a card that is gone."""
    for file, length in ((DOCKER, 40), (DROP_IN, 12)):
        host.run(["sed", "-i", f"s/{was[:length]}/{now[:length]}/", file])


def taken_back(operator: Operator, host: Host, old: dict[str, Any], new: dict[str, Any]) -> None:
    """The way back asks for the old card, hears the confirmation while it runs, finds the files that now name the new
    one, and proves the old UUID."""
    process = operator.start("rollback", operator.change().name, "--yes")
    told = "\n".join(asked(operator, process, "undo").data["asks"])
    assert f"put into slot {SLOT}: serial {old['serial']}, {old['uuid']}" in told
    swap(host, old["serial"])
    operator.run("confirm", operator.change().name, "gpu1").ended(0)
    operator.finish(process).ended(5)
    assert f"{DOCKER}:2 ({new['uuid']})" in held(operator)
    rename(host, new["uuid"], old["uuid"])
    operator.run("resolve", operator.change().name, "gpu1", "--retry").ended(0)
    said = operator.run("resume", "--yes").ended(0)
    assert cards.cards(host)[0]["uuid"] == old["uuid"]
    assert "cards: 2 of 2 equal" in said.out, said.out
    assert "machine: the same machine-id" in said.out


@pytest.mark.timeout(600)
@pytest.mark.case("bmc-says-success-host-still-on")
def test_nobody_is_asked_for_hands_while_the_bmc_says_on(fresh_hosts: Lab, tmp_path: Path) -> None:
    """The host is silent, but the plan's own command speaks of power: no question, and a hold with these words."""
    operator, host = Operator(fresh_hosts, tmp_path), fresh_hosts.host("gpu1")
    old = cards.cards(host)[0]
    process = begin(operator, manual(old, power_status=["/bin/echo", "Chassis Power is on"], off_within="15s"))
    said = operator.finish(process).ended(5)
    assert "NOT safe to open" in held(operator) and "Chassis Power is on" in held(operator)
    assert not any(event.data.get("asks") for event in operator.events()), said.out
    wait_until(lambda: host.status()["power"] == "off", timeout=30, what="the host to be off")
    power_on(host)


def test_a_lab_card_is_changed_only_with_the_power_off(lab: Lab) -> None:
    with pytest.raises(LabError, match="with the power off"):
        cards.pull(lab.host("gpu1"), BUS)
