"""The stack by real dnf and rpm on a lab host: there and back exactly, cut off in the middle, bad ones held."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
from playing import Player, kill_tree
from real_packages import provide
from staging import Steps

from gpuchange.lab import Host, Lab, rpms
from gpuchange.waiting import wait_until

OLD, NEW = "550.54.15", "570.172.08"
WANTED = {"driver": NEW, "container_toolkit": "1.17.8"}
LEDGER = "/var/log/gpuchange-lab/rpms.log"
REPOSITORY = "/srv/rpms"
PURGE = (
    "systemctl disable --now modelserver.service; export DEBIAN_FRONTEND=noninteractive;"
    " apt-get -y -q purge 'nvidia-*' 'libnvidia-*'"
)
DNF = "apt-get -q update && apt-get -y -q --no-install-recommends install dnf rpm"
FIRST = f"dnf -y -q install lab-base && dnf -y -q install cuda-drivers-{OLD} nvidia-container-toolkit-1.16.2"
LOCK = f"nvidia-driver-cuda-3:{OLD}-1.lab.*"
EVERYTHING = (
    "rpm -qa --qf '%{NEVRA}\\n' | sort; cat /etc/dnf/plugins/versionlock.list;"
    " dnf -C -q repoquery --userinstalled | sort; find /etc /usr/bin /usr/lib/x86_64-linux-gnu /usr/src /lib/modules/"
    " -type f ! -path '*/__pycache__/*' -print0 | sort -z | xargs -0 sha256sum"
)
PREPARED: set[str] = set()


def prepare(lab: Lab, host: Host) -> None:
    """A host whose driver came by dnf, once; its snapshot serves all tests."""
    host.restore("start")
    host.run(["sh", "-c", PURGE])
    host.power("cycle")  # the packages' driver leaves the kernel
    host.wait_ready()
    provide(host, lab.host("lb1").root, "dnf", "rpm")
    host.run(["sh", "-c", DNF], timeout=600)
    shutil.copytree(rpms.repository(), host.root / REPOSITORY.lstrip("/"))
    (host.root / "etc/yum.repos.d").mkdir(exist_ok=True)
    (host.root / "etc/yum.repos.d/cuda-lab.repo").write_text(rpms.sources(f"file://{REPOSITORY}"))
    host.run(["sh", "-c", f"{FIRST}; modprobe nvidia-uvm; modprobe nvidia-drm; nvidia-smi -L"], timeout=300)
    (host.root / "etc/dnf/plugins").mkdir(exist_ok=True)
    (host.root / "etc/dnf/plugins/versionlock.list").write_text(f"# locks\n{LOCK}\nbash-0:5.2-1.*\n")
    host.snapshot("dnf")
    PREPARED.add(host.name)


@pytest.fixture
def player(lab: Lab, request: pytest.FixtureRequest) -> Player:
    """A host with the old driver by dnf, and a change of its own."""
    host = lab.host("gpu2")
    lacking = [package for tool, package in rpms.TOOLS.items() if shutil.which(tool) is None]
    if lacking:
        pytest.skip(f"RPMs cannot be built here: apt-get install {' '.join(lacking)}")
    if host.name in PREPARED:
        host.restore("dnf")
    else:
        prepare(lab, host)
    return Player(lab, "gpu2", "d-" + request.node.name[5:40].replace("_", "-").strip("-"))


def begun(player: Player, **wanted: str) -> Steps:
    steps = Steps(player, provider="dnf", **wanted)
    for key in ("preflight/host", "preflight/dnf", "record/host", "backup/dnf", "seal/host"):
        verdict = steps.step(key)
        assert verdict.outcome == "accept", (verdict, steps.body)
    return steps


def runs(player: Player) -> list[str]:
    return player.sh(f"cat {LEDGER}").splitlines()


def test_there_and_back_exactly_and_without_a_repository(player: Player) -> None:
    before, boots = player.sh(EVERYTHING), player.host.boots
    steps = begun(player, **WANTED)
    assert steps.evidence["preflight/dnf"]["transaction"]["install"]["cuda-drivers"] == f"3:{NEW}-1.lab"
    assert steps.evidence["backup/dnf"]["kept"] == 14
    player.sh(f"mv {REPOSITORY} {REPOSITORY}.off; rm -rf /var/cache/dnf/*")
    assert steps.step("stack/dnf", **WANTED).outcome == "accept", steps.body
    assert steps.body["driver"]["loaded"] == NEW and player.host.boots == boots + 1
    assert steps.body["holds"] == ["# locks", f"nvidia-driver-cuda-3:{NEW}-1.lab.*", "bash-0:5.2-1.*"]
    assert steps.step("stack/dnf", **WANTED).outcome == "accept" and steps.body["changed"] is False
    assert steps.step("stack/dnf", "probe", **WANTED).outcome == "accept" and player.host.boots == boots + 1
    assert steps.step("verify/host", settle="0s").outcome == "accept", steps.body
    assert steps.step("stack/dnf", "undo", **WANTED).outcome == "accept", steps.body
    proved = steps.step("seal/host", "undo")
    assert proved.outcome == "accept", proved
    player.sh(f"mv {REPOSITORY}.off {REPOSITORY}; dnf -q makecache")
    assert player.sh(EVERYTHING) == before and player.host.boots == boots + 2


@pytest.mark.slow
def test_a_power_cut_inside_rpm_is_completed(player: Player) -> None:
    steps, had = begun(player, **WANTED), len(runs(player))
    player.host.break_("apt-hangs")
    args: dict[str, Any] = {"transaction": steps.evidence["preflight/dnf"]["transaction"]}
    process = player.start("stack_dnf", "apply", args)
    wait_until(lambda: len(runs(player)) > had, timeout=90, what="the transaction to be in the middle")
    kill_tree(process)
    said = player.play("stack_dnf", "apply", args)
    assert said["state"] == "running" and "still active on this host since" in said["why"], said
    player.host.power("cut")
    player.host.power("on")
    player.host.wait_ready()
    player.host.mend("apt-hangs")
    assert player.play("stack_dnf", "probe", args)["state"] == "not_done"
    assert steps.step("stack/dnf", **WANTED).outcome == "accept", steps.body
    assert steps.body["repaired"] == ["previous attempt was interrupted inside rpm; the transaction was completed"]
    assert player.sh("dnf -C -q repoquery --duplicates --installed").strip() == ""
    assert steps.step("verify/host", settle="0s").outcome == "accept", steps.body


@pytest.mark.slow
def test_a_module_that_does_not_build_is_undone_and_proved(player: Player) -> None:
    before, boots = player.sh(EVERYTHING), player.host.boots
    steps = begun(player, driver=NEW)
    player.host.break_("driver-build-fails")
    failed = steps.step("stack/dnf", driver=NEW)
    assert failed.outcome == "reject" and f"no nvidia module {NEW} exists for kernel" in failed.why, failed
    assert steps.step("stack/dnf", "undo", driver=NEW).outcome == "accept", steps.body
    assert steps.step("seal/host", "undo").outcome == "accept", steps.body
    player.host.mend("driver-build-fails")
    assert player.sh(EVERYTHING) == before and player.host.boots == boots


def test_what_is_in_the_way_is_named_before_anything_is_changed(player: Player) -> None:
    before = player.sh(EVERYTHING)

    def says(**wanted: str) -> str:
        verdict = Steps(player, provider="dnf", **wanted).step("preflight/dnf")
        assert verdict.outcome == "reject", verdict
        return verdict.why

    assert f"offered: 3:{OLD}-1.lab, 3:{NEW}-1.lab" in says(driver="570.999.1")
    assert "nccl 2.25.1 is not offered" in says(nccl="2.25.1")
    seen = Steps(player, provider="dnf", driver=OLD, container_toolkit="1.16.2")
    assert seen.step("preflight/dnf").outcome == "accept" and seen.body["as_wanted"], seen.body
    player.sh(f"mv {REPOSITORY}/repodata {REPOSITORY}/off")
    assert "repositories cannot be read: Failed to download metadata for repo 'cuda-lab'" in says(driver=NEW)
    player.sh(f"mv {REPOSITORY}/off {REPOSITORY}/repodata")
    assert player.sh(EVERYTHING) == before
