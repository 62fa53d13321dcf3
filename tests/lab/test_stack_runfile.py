"""The driver by NVIDIA's .run file on a real lab host: there and back exactly, cut off in the middle, bad ones held."""

from __future__ import annotations

import hashlib
import shutil
from typing import Any

import pytest
from playing import Player, kill_tree
from staging import Steps

from gpuchange.lab import Host, Lab, runfile
from gpuchange.providers.stack.runfile import RunfileStack
from gpuchange.waiting import wait_until

OLD, NEW = "550.54.15", "570.172.08"
SHARE = "/opt/nvidia"
LEDGER = "/var/log/gpuchange-lab/runfile.log"
PURGE = (
    "systemctl disable --now modelserver.service; export DEBIAN_FRONTEND=noninteractive; apt-get -y -q purge"
    " 'nvidia-driver-*' 'nvidia-utils-*' 'libnvidia-compute-*' 'nvidia-dkms-*' 'nvidia-kernel-common-*'"
)
TOOLS = "cd /usr/local/bin; printf '#!/bin/sh\\necho 12.2.0\\n' > cc; chmod 755 cc; ln -sf cc make"
EVERYTHING = (
    "find /etc /usr /lib/modules /var/lib/nvidia /var/lib/dkms ! -path '*/__pycache__/*' -type f -print0"
    " | sort -z | xargs -0 sha256sum; find /usr/bin /usr/lib /var/lib/dkms -type l | sort | xargs ls -ld --time-style=+"
)
PREPARED: set[str] = set()


def put(host: Host, version: str) -> dict[str, str]:
    """The lab's installer of this version on the host: {file, sha256} as a plan names it."""
    made = runfile.runfile(version)
    folder = host.root / SHARE.lstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy2(made, folder)
    return {"file": f"{SHARE}/{made.name}", "sha256": hashlib.sha256(made.read_bytes()).hexdigest()}


def prepare(host: Host) -> None:
    """A host whose driver came by a .run file, once; its snapshot serves all tests."""
    host.restore("start")
    host.run(["sh", "-c", PURGE])
    host.power("cycle")  # the packages' driver leaves the kernel
    host.wait_ready()
    old = put(host, OLD)["file"]
    put(host, NEW)
    host.run(["sh", "-c", f"{TOOLS}; sh {old} --silent --dkms && nvidia-smi -L"])
    host.snapshot("runfile")
    PREPARED.add(host.name)


@pytest.fixture
def player(lab: Lab, request: pytest.FixtureRequest) -> Player:
    """A host with the old driver by .run, and a change of its own."""
    host = lab.host("gpu2")
    if host.name in PREPARED:
        host.restore("runfile")
    else:
        prepare(host)
    return Player(lab, "gpu2", "r-" + request.node.name[5:40].replace("_", "-").strip("-"))


def wanted(player: Player, version: str = NEW, **more: Any) -> dict[str, Any]:
    plan = {"driver": version, **put(player.host, version), "previous": put(player.host, OLD), **more}
    return RunfileStack.model_validate(plan).model_dump(mode="json")


def begun(player: Player, plan: dict[str, Any]) -> Steps:
    """A change up to its seal."""
    steps = Steps(player, provider="runfile", **plan)
    for key in ("preflight/host", "preflight/runfile", "record/host", "backup/runfile", "seal/host"):
        assert steps.step(key).outcome == "accept", steps.body
    return steps


def runs(player: Player) -> list[str]:
    return player.sh(f"cut -d' ' -f2- {LEDGER}").splitlines()


def test_there_and_back_exactly_with_one_reboot_each(player: Player) -> None:
    before, boots, had = player.sh(EVERYTHING), player.host.boots, runs(player)
    plan = wanted(player)
    steps = begun(player, plan)
    assert steps.evidence["backup/runfile"]["kept"] == 2
    player.sh(f"rm -r {SHARE}")  # the share is gone: the change has its own copies
    assert steps.step("stack/runfile", **plan).outcome == "accept", steps.body
    assert steps.body["driver"]["loaded"] == NEW == steps.body["installed"] and player.host.boots == boots + 1
    assert steps.step("stack/runfile", **plan).outcome == "accept" and steps.body["changed"] is False
    assert steps.step("stack/runfile", "probe", **plan).outcome == "accept" and player.host.boots == boots + 1
    assert runs(player)[len(had) :] == [f"{NEW} uninstall {OLD}", f"{NEW} install {NEW}", f"{NEW} installed {NEW}"]
    verified = steps.step("verify/host", settle="0s")
    assert verified.outcome == "accept", verified
    assert steps.step("stack/runfile", "undo", **plan).outcome == "accept", steps.body
    proved = steps.step("seal/host", "undo")
    assert proved.outcome == "accept" and "driver by .run file: 2 of 2 equal" in proved.findings, proved
    put(player.host, OLD), put(player.host, NEW)
    assert player.sh(EVERYTHING) == before and player.host.boots == boots + 2


def test_a_host_without_a_driver_goes_back_to_none(player: Player) -> None:
    player.sh("nvidia-uninstall --silent")
    before = player.sh(EVERYTHING)
    plan = wanted(player, dkms=False, previous=None)
    steps = Steps(player, provider="runfile", **plan)
    for key in ("preflight/runfile", "record/host", "backup/runfile"):
        assert steps.step(key).outcome == "accept", steps.body
    assert steps.step("stack/runfile", **plan).outcome == "accept", steps.body
    assert steps.body["driver"]["modules"]["nvidia"]["file"].endswith("/kernel/drivers/video/nvidia.ko")
    assert steps.step("stack/runfile", "undo", **plan).outcome == "accept", steps.body
    assert player.sh(EVERYTHING) == before and not player.sh("ls /proc/driver").strip()


def test_killed_in_the_middle_it_is_found_again_and_a_power_cut_is_completed(player: Player) -> None:
    plan, had = wanted(player), len(runs(player))
    steps = begun(player, plan)
    player.host.break_("apt-hangs")
    args = {"transaction": steps.evidence["preflight/runfile"]["transaction"]}
    process = player.start("stack_runfile", "apply", args)
    wait_until(lambda: len(runs(player)) > had + 1, timeout=60, what="the installer to be in the middle")
    kill_tree(process)
    said = player.play("stack_runfile", "apply", args)
    assert said["state"] == "running" and "still active on this host since" in said["why"], said
    assert player.play("stack_runfile", "probe", args)["state"] == "running"
    player.host.power("cut")
    player.host.power("on")
    player.host.wait_ready()
    player.host.mend("apt-hangs")
    assert player.play("stack_runfile", "probe", args)["state"] == "not_done"
    assert steps.step("stack/runfile", **plan).outcome == "accept", steps.body
    assert steps.body["repaired"] == ["previous attempt was interrupted inside the installer; it was run again"]
    assert steps.step("verify/host", settle="0s").outcome == "accept", steps.body


def test_a_module_that_does_not_build_is_undone_and_proved(player: Player) -> None:
    plan, boots = wanted(player), player.host.boots
    before = player.sh(EVERYTHING)
    steps = begun(player, plan)
    player.host.break_("driver-build-fails")
    failed = steps.step("stack/runfile", **plan)
    assert failed.outcome == "reject" and "Failed to install the kernel module through DKMS" in failed.why, failed
    assert player.host.boots == boots
    assert steps.step("stack/runfile", "undo", **plan).outcome == "accept", steps.body
    assert steps.step("seal/host", "undo").outcome == "accept", steps.body
    player.host.mend("driver-build-fails")
    assert player.sh(EVERYTHING) == before and player.host.boots == boots


def test_what_is_in_the_way_is_named_before_anything_is_changed(player: Player) -> None:
    plan = wanted(player)
    before = player.sh(EVERYTHING)

    def says(**other: Any) -> str:
        steps = Steps(player, provider="runfile", **{**plan, **other})
        verdict = steps.step("preflight/runfile")
        assert verdict.outcome == "reject", verdict
        return verdict.why

    assert f"its sha256 is {plan['sha256']}, not {'0' * 64}" in says(sha256="0" * 64)
    assert f"installs driver {NEW}, not 570.124.06" in says(driver="570.124.06")
    assert "/opt/none.run does not exist on this host" in says(file="/opt/none.run")
    assert f"driver {OLD}, whose .run file is not on the host (name it in stack.previous)" in says(previous=None)
    newer = put(player.host, "570.124.06")
    assert f"stack.previous: {newer['file']} installs driver 570.124.06, not {OLD}" in says(previous=newer)
    player.sh("mv /usr/local/bin/make /usr/local/bin/make.off; sleep 600 > /dev/null 2>&1 & echo $! > /tmp/.X0-lock")
    lacking = says()
    assert "not installed on this host: make" in lacking and "an X server is running (pid " in lacking, lacking
    player.sh("mv /usr/local/bin/make.off /usr/local/bin/make; rm /tmp/.X0-lock")
    apt = Steps(player, driver=NEW).step("preflight/apt")
    assert f"driver {OLD} was installed by NVIDIA's .run file" in apt.why and "provider: runfile" in apt.why, apt
    assert player.sh(EVERYTHING) == before


def test_a_driver_from_packages_is_not_half_overwritten(lab: Lab) -> None:
    host = lab.host("gpu2")
    host.restore("start")
    player = Player(lab, "gpu2", "r-packaged")
    host.run(["sh", "-c", TOOLS])
    verdict = Steps(player, provider="runfile", **wanted(player)).step("preflight/runfile")
    assert verdict.outcome == "reject" and "the driver is installed from packages (libnvidia-compute-550" in verdict.why
