"""The distribution's real NVIDIA driver with a real DKMS build, up to where a card would be needed, and back."""

from __future__ import annotations

import re

import pytest
from playing import Player
from real_packages import provide
from staging import Steps

from gpuchange.checks.snapshot import parse
from gpuchange.lab import Lab

PURGE = (
    "systemctl disable --now modelserver.service; export DEBIAN_FRONTEND=noninteractive;"
    " apt-get -y -q purge 'nvidia-*' 'libnvidia-*' 'cuda-*' 'libcudnn*' dkms 'linux-headers-*'"
)
BUILD = "apt-get -q update && apt-get -y -q --no-install-recommends install dkms linux-headers-cloud-amd64"
LOOKS = (
    "dpkg-query -W -f='${Package} ${Version} ${Status}\\n' | grep -v deinstall; apt-mark showauto; dkms status;"
    " find /lib/modules -name 'nvidia*'; ls /etc/modprobe.d /etc/apt/apt.conf.d"
)
MODULES = {"nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm", "nvidia_peermem"}


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_the_distributions_driver_is_built_for_the_next_kernel_fails_for_want_of_a_card_and_goes_back(lab: Lab) -> None:
    """DKMS compiles NVIDIA's module for the kernel that would boot next; no card, so no driver that loads; undone."""
    host, player = lab.host("gpu1"), Player(lab, "gpu1", "real-driver")
    host.restore("start")
    player.sh(PURGE)
    host.power("cycle")  # the lab's own driver leaves the kernel
    host.wait_ready()
    provide(host, lab.host("lb1").root, "dkms", "linux-headers-cloud-amd64", "nvidia-driver")
    host.run(["sh", "-c", BUILD], timeout=1800)
    kernel = player.sh("ls /lib/modules | grep cloud").strip()
    player.sh(f"touch /boot/vmlinuz-{kernel}")  # a guest has no kernel of its own to install
    version = re.findall(r"Version: (\d+[.\d]+)", player.sh("apt-cache show nvidia-driver"))[0]
    before = player.sh(LOOKS)
    steps = Steps(player, driver=version)
    for key in ("preflight/apt", "record/host", "backup/packages", "seal/host"):
        assert steps.step(key).outcome == "accept", steps.body
    assert steps.evidence["seal/host"]["facts"]["boot"]["kernel"] == kernel
    failed = steps.step("stack/apt", driver=version)
    while failed.outcome == "again":  # DKMS compiles for minutes
        failed = steps.step("stack/apt", driver=version)
    assert failed.outcome == "reject", failed
    assert f"the loaded driver is none, not {version}" in failed.why, failed
    built = steps.body["driver"]["modules"]
    assert MODULES - {"nvidia_peermem"} <= set(built) and {row["version"] for row in built.values()} == {version}, built
    assert all(row["file"].startswith(f"/lib/modules/{kernel}/updates/dkms/") for row in built.values()), built
    assert f"{kernel}, x86_64: installed" in player.sh("dkms status")
    verified = steps.step("verify/host", settle="0s")
    assert verified.outcome == "reject" and f"driver loaded should be {version}, is absent" in verified.why, verified
    picture = parse(steps.body["facts"])
    assert (picture.driver.loaded, picture.driver.next_boot, picture.driver.userspace) == (None, version, version)
    assert steps.step("stack/apt", "undo", driver=version).outcome == "accept", steps.body
    proved = steps.step("seal/host", "undo", settle="0s")
    assert proved.outcome == "accept", proved
    assert player.sh(LOOKS) == before
