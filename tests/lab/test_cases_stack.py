"""What has gone wrong for others with drivers, DKMS, Secure Boot, fabric managers and containers: staged on a host.

Each test makes the state for real, plays the phase that has to meet it, and holds it to phase and words.
"""

from __future__ import annotations

import base64

import pytest
from playing import Player
from staging import OLD, OVERNIGHT, TOOLKIT, WANTED, Steps, seen_by
from test_stack_apt import STATE, prepare

from gpuchange.checks.snapshot import parse
from gpuchange.waiting import wait_until

MODULES = "/lib/modules/$(uname -r)/updates/dkms"
PERIODIC = "eval $(apt-config shell ON APT::Periodic::Enable); echo ${ON:-unset}"


# ------------------------------------------------------------------------------------------- driver and library


@pytest.mark.case("nvml-mismatch-after-unattended-upgrade")
def test_a_driver_that_was_upgraded_overnight_is_no_baseline(player: Player) -> None:
    steps = Steps(player, driver=WANTED)
    assert steps.step("record/host").outcome == "accept"
    player.host.break_("upgraded-overnight")
    said = steps.step("preflight/host")
    mismatch = f"baseline inconsistent: module {OLD} loaded, userspace {OVERNIGHT} (unattended-upgrade at 20"
    assert said.outcome == "reject" and mismatch in said.why, said
    picture = parse(steps.body["facts"])
    assert (picture.driver.loaded, picture.driver.next_boot, picture.driver.userspace) == (OLD, OVERNIGHT, OVERNIGHT)
    assert not picture.smi.ok and "version mismatch" in picture.smi.why
    assert [user.unit for user in picture.gpu_users] == ["modelserver.service"], "nvidia-smi fails, the user is there"
    used = steps.step("drain/gpu_users", policy="refuse")
    assert used.outcome == "reject" and "GPU in use" in used.why
    sealed = steps.step("seal/host")
    assert sealed.outcome == "reject" and mismatch in sealed.why, sealed
    assert steps.evidence["record/host"]["facts"]["loaded"]["proc_version"].count(OLD) == 1


@pytest.mark.case("nvml-mismatch-after-unattended-upgrade")
def test_automatic_upgrades_are_off_while_a_host_is_drained_also_over_a_reboot(player: Player) -> None:
    """Nothing of it is left afterwards, whether the host comes back by release or by the end of the change."""
    users = {"policy": "stop", "services": ["modelserver.service"]}
    steps = Steps(player)
    player.sh("""echo 'APT::Periodic::Update-Package-Lists "always";' > /etc/apt/apt.conf.d/20auto-upgrades""")
    nightly = "rm -f /var/lib/apt/periodic/*; /usr/lib/apt/apt.systemd.daily update; ls /var/lib/apt/periodic"
    assert "update-stamp" in player.sh(nightly) and player.sh(PERIODIC).strip() == "unset"
    reloads = "systemctl show --property=UnitsLoadTimestampMonotonic"
    before = player.sh(reloads)
    assert steps.step("drain/gpu_users", **users).outcome == "accept"
    assert player.sh(reloads) == before, "systemd is not reloaded for it"
    assert player.sh(nightly) == "" and player.sh(PERIODIC).strip() == "0"
    player.host.power("cycle")
    player.host.wait_ready()
    assert player.sh(nightly) == "", "a timer catches up right after the boot"
    assert steps.step("drain/gpu_users", "undo", **users).outcome == "accept"
    assert "update-stamp" in player.sh(nightly) and player.sh(PERIODIC).strip() == "unset"
    assert steps.step("drain/gpu_users", **users).outcome == "accept" and player.sh(PERIODIC).strip() == "0"
    assert player.play("owner_marker", "apply", {})["released"] and player.sh(PERIODIC).strip() == "unset"


@pytest.mark.case("reboot-does-not-cure-mismatch")
def test_a_module_that_no_kernel_has_is_named_and_not_rebooted_for(player: Player) -> None:
    steps = Steps(player, driver=WANTED)
    assert steps.step("record/host").outcome == "accept"
    player.sh(f"cp -a {MODULES} /root/old-modules")
    player.host.break_("driver-build-fails")
    args = prepare(player, {"driver": WANTED})
    failed = player.until("stack_apt", "apply", args)
    assert failed["state"] == "not_done" and "a reboot would not fix this" in failed["why"], failed
    assert "make.log: /var/lib/dkms/" in failed["why"] and "error: implicit declaration" in failed["why"], failed
    player.sh(
        f"mkdir -p {MODULES}; cp -a /root/old-modules/. {MODULES}/; depmod"
    )  # the old module outlived its package
    player.host.power("cycle")
    player.host.wait_ready()
    assert OLD in player.sh("cat /proc/driver/nvidia/version")
    kernel, boots = player.sh("uname -r").strip(), player.host.boots
    verified = steps.step("verify/host", settle="0s")
    assert verified.outcome == "reject"
    assert f"no nvidia module {WANTED} exists for kernel {kernel}; reboot will not fix this" in verified.why, verified
    again = player.until("stack_apt", "apply", {**args, "generation": 1})
    assert again["state"] == "not_done" and f"nvidia is {OLD} (/lib/modules/{kernel}/" in again["why"], again
    assert player.host.boots == boots


@pytest.mark.case("reboot-does-not-cure-mismatch")
def test_a_module_that_vanished_over_the_one_reboot_is_named(player: Player) -> None:
    args, boots = prepare(player, {"driver": WANTED}), player.host.boots
    while (said := player.play("stack_apt", "apply", args))["state"] == "running" and not said.get("rebooting"):
        continue
    for module in (player.host.root / "lib/modules").glob("*/updates/dkms/nvidia*.ko"):
        module.unlink()
    failed = player.until("stack_apt", "apply", args)
    kernel = player.sh("uname -r").strip()
    assert failed["state"] == "not_done", failed
    assert (
        f"rebooted, but no nvidia module {WANTED} exists for kernel {kernel}; reboot will not fix this" in failed["why"]
    )
    assert player.host.boots == boots + 1
    back = player.until("stack_apt", "undo", args, "undo")
    assert back["state"] == "done" and back["driver"]["loaded"] == OLD, back


# --------------------------------------------------------------------------------------------- modules and DKMS


@pytest.mark.case("stale-dkms-tree-blocks-every-rebuild")
def test_what_a_removed_driver_left_in_dkms_is_named_and_set_aside_on_demand(player: Player) -> None:
    player.host.break_("stale-dkms-tree")
    steps = Steps(player, **TOOLKIT)
    said = steps.step("preflight/host")
    assert said.outcome == "reject" and "dkms database broken by leftover nvidia/390.48" in said.why, said
    steps = Steps(player, dkms_leftovers="set_aside", **TOOLKIT)
    allowed = steps.step("preflight/host")
    assert allowed.outcome == "accept" and "it is set aside before the packages change" in seen_by(allowed), allowed
    for key in ("preflight/apt", "backup/packages", "stack/apt"):
        params = {"dkms_leftovers": "set_aside", **TOOLKIT} if key == "stack/apt" else {}
        done = steps.step(key, **params)
        assert done.outcome == "accept", done
    assert "dkms leftover nvidia/390.48 set aside; a rollback puts it back" in done.findings
    assert "nvidia/550.54.15" in player.sh("dkms status")
    assert player.sh(f"readlink {STATE}/{player.change}/dkms-leftovers/nvidia/390.48/source").strip()
    assert steps.step("stack/apt", "undo", **TOOLKIT).outcome == "accept"
    assert player.sh("readlink /var/lib/dkms/nvidia/390.48/source").strip() == "/usr/src/nvidia-390.48"


@pytest.mark.case("mixed-module-set-nvidia-vs-modeset")
def test_one_odd_module_is_named_with_its_file(player: Player) -> None:
    steps = Steps(player, driver=WANTED)
    assert steps.step("record/host").outcome == "accept"
    fetch = "cd /root && apt-get -q update && apt-get -q download nvidia-dkms-570 && dpkg -x nvidia-dkms-570*.deb new"
    player.sh(f"{fetch}; cp new/usr/src/nvidia-*/prebuilt/nvidia-modeset.ko_ {MODULES}/nvidia-modeset.ko")
    kernel = player.sh("uname -r").strip()
    odd = f"nvidia_modeset is {WANTED} (/lib/modules/{kernel}/updates/dkms/nvidia-modeset.ko), nvidia is {OLD}"
    for key in ("preflight/host", "seal/host"):
        said = steps.step(key)
        assert said.outcome == "reject" and f"baseline inconsistent: {odd}" in said.why, said
    steps.plan = {}
    verified = steps.step("verify/host", settle="0s")
    assert verified.outcome == "reject" and odd in verified.why, verified


PACK = """
import glob, gzip, os
path = glob.glob("/lib/modules/*/updates/dkms/nvidia-modeset.ko")[0]
out = b""
for name, data in ((path.lstrip("/"), open(path, "rb").read()), ("TRAILER!!!", b"")):
    head = b"070701" + b"".join(b"%08x" % n for n in (1, 33188, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0))
    head += name.encode() + b"\\0"
    out += head + b"\\0" * (-len(head) % 4) + data + b"\\0" * (-len(data) % 4)
open("/boot/initrd.img-" + os.uname().release, "wb").write(gzip.compress(out))
"""


@pytest.mark.case("mixed-module-set-nvidia-vs-modeset")
def test_an_old_module_in_the_initramfs_stops_the_stack_before_its_reboot(player: Player) -> None:
    player.sh(f"echo {base64.b64encode(PACK.encode()).decode()} | base64 -d | python3")
    args, boots = prepare(player, {"driver": WANTED}), player.host.boots
    failed = player.until("stack_apt", "apply", args)
    image = f"/boot/initrd.img-{player.sh('uname -r').strip()}"
    assert failed["state"] == "not_done" and f"{image} still has nvidia_modeset {OLD} (" in failed["why"], failed
    assert player.host.boots == boots
    player.sh(f"rm {image}")
    done = player.until("stack_apt", "apply", {**args, "generation": 1})
    assert done["state"] == "done" and done["driver"]["loaded"] == WANTED, done


# ---------------------------------------------------------------------------------------------------- Secure Boot


@pytest.mark.case("secure-boot-dkms-key-not-enrolled")
def test_a_key_that_nobody_enrolled_stops_before_drain(player: Player) -> None:
    player.host.break_("secure-boot")
    said = Steps(player, driver=WANTED).step("preflight/apt")
    assert said.outcome == "reject"
    words = "Secure Boot is on and the DKMS signing key is not enrolled; the new module will not load without console"
    assert words in said.why and "mokutil --import /var/lib/dkms/mok.pub" in said.why, said
    assert Steps(player, **TOOLKIT).step("preflight/apt").outcome == "accept", "no module is built for the toolkit"


@pytest.mark.case("secure-boot-dkms-key-not-enrolled")
def test_a_refused_key_that_shows_only_at_the_reboot_leads_back_to_the_old_driver(player: Player) -> None:
    args, boots = prepare(player, {"driver": WANTED}), player.host.boots
    player.host.break_("key-rejected")
    failed = player.until("stack_apt", "apply", args)
    assert failed["state"] == "not_done" and player.host.boots == boots + 1, failed
    assert "could not insert 'nvidia': Key was rejected by service; Secure Boot is on" in failed["why"], failed
    back = player.until("stack_apt", "undo", args, "undo")
    assert back["state"] == "done" and back["driver"]["loaded"] == OLD, back


# ---------------------------------------------------------------------------------- flavour, fabric, containers


@pytest.mark.case("right-version-wrong-module-flavour")
def test_a_proprietary_module_for_a_card_that_needs_the_open_one_is_refused(player: Player) -> None:
    player.sh('sed -i \'s/"pci_device": "[0-9a-f]*"/"pci_device": "2bb1"/\' /etc/gpuchange-lab/cards.json')
    player.sh("/usr/lib/gpuchange-lab/simgpu refresh")
    steps = Steps(player, driver=WANTED)
    said = steps.step("preflight/host")
    assert said.outcome == "reject", said
    assert f"driver {WANTED} proprietary does not drive RTX PRO 6000 Blackwell" in said.why, said
    assert "use the open flavour" in said.why


FABRIC = "apt-get -q update; apt-get -y -q install nvidia-fabricmanager-550=550.54.15-1; systemctl enable --now"
FABRIC += " nvidia-fabricmanager.service"


@pytest.mark.case("fabricmanager-differs-in-patch-level")
def test_a_driver_for_which_no_fabric_manager_is_to_be_had_is_refused(player: Player) -> None:
    player.host.break_("nvswitch")
    player.sh(FABRIC)
    steps = Steps(player, driver=WANTED)
    assert steps.step("preflight/host").outcome == "accept"
    assert len(parse(steps.body["facts"]).switches) == 4
    said = steps.step("preflight/apt")
    assert said.outcome == "reject", said
    assert f"nvidia-fabricmanager-570 {WANTED} is not offered" in said.why and "offered: 570.124.06-1" in said.why, said
    assert "nvidia-fabricmanager-550 550.54.15-1 will not work with it" in said.why
    pair = Steps(player, driver="570.124.06")
    assert pair.step("preflight/apt").outcome == "accept"
    assert pair.body["transaction"]["install"]["nvidia-fabricmanager-570"] == "570.124.06-1"
    assert steps.step("record/host").outcome == "accept"
    player.host.break_("upgraded-overnight")  # same branch, another patch level
    player.host.power("cycle")
    player.host.wait_ready()
    steps.plan = {"stack": {"driver": OVERNIGHT}}
    verified = steps.step("verify/host", settle="0s")
    failed = "NVSwitch present, but nvidia-fabricmanager.service is failed: "
    assert verified.outcome == "reject" and failed in verified.why, verified
    assert f"interface version {OLD} don't match with driver version {OVERNIGHT}" in verified.why, verified


@pytest.mark.case("fabricmanager-fails-where-not-needed")
def test_a_fabric_manager_that_fails_without_nvswitches_fails_nothing(player: Player) -> None:
    player.sh(FABRIC + " || true")
    wait_until(
        lambda: "failed" in player.sh("systemctl is-active nvidia-fabricmanager.service || true"),
        timeout=30,
        what="the fabric manager to give up",
    )
    assert "NV_WARN_NOTHING_TO_DO" in player.sh("journalctl -u nvidia-fabricmanager -o cat --no-pager")
    steps = Steps(player)
    said = steps.step("preflight/host")
    words = "no NVSwitch on this host: fabric manager not required; that its service has failed means nothing"
    assert said.outcome == "accept" and words in said.findings, said
    assert steps.step("record/host").outcome == "accept"
    verified = steps.step("verify/host", settle="0s")
    assert verified.outcome == "accept" and words in verified.findings, verified


@pytest.mark.case("daemon-reload-cuts-gpus-from-running-containers")
def test_a_running_container_keeps_its_gpus_and_one_that_lost_them_holds_back_verify(player: Player) -> None:
    player.host.break_("gpu-container")
    users = {"policy": "stop", "services": ["modelserver.service"]}
    steps = Steps(player, **TOOLKIT)
    for key in ("preflight/host", "preflight/apt", "record/host", "backup/packages", "drain/gpu_users", "seal/host"):
        said = steps.step(key, **(users if key == "drain/gpu_users" else {}))
        assert said.outcome == "accept", (key, said)
        assert "GPU 0" in player.sh("docker exec trainer nvidia-smi -L"), f"{key} reloads systemd"
    (seen,) = steps.evidence["seal/host"]["facts"]["containers"]["running"]
    assert (seen["name"], seen["rc"]) == ("trainer", 0)
    steps.plan = {}
    assert steps.step("verify/host", settle="0s", container_image="cuda:base").outcome == "accept"
    player.sh("systemctl daemon-reload")
    verified = steps.step("verify/host", settle="0s", container_image="cuda:base")
    words = "host OK, container trainer sees no GPU: Failed to initialize NVML: Unknown Error"
    assert verified.outcome == "reject" and words in verified.why, verified
    assert "fresh" not in verified.why, "a new container sees them"
    player.host.mend("gpu-container")
    gone = steps.step("verify/host", settle="0s", container_image="cuda:base")
    assert gone.outcome == "reject" and "no container runtime runs on this host" in gone.why, gone
