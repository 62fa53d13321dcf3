"""What has gone wrong for others with apt: sources that mix, holds that vanish, questions to nobody. Staged on a host.

Each test makes the state for real, plays the phase that has to meet it, and holds it to phase and words.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playing import Player
from staging import OLD, TOOLKIT, WANTED, Steps
from test_stack_apt import ledger_length, prepare

from gpuchange.waiting import wait_until

# ------------------------------------------------------------------------------------------ sources and their mixes

CONTROL = "Package: {name}\nVersion: {version}\nArchitecture: amd64\nMaintainer: lab <lab@localhost>\n"
CONTROL += "Depends: {depends}\nDescription: {name}\n"
PARTS_580 = ("nvidia-utils", "libnvidia-compute", "nvidia-dkms", "nvidia-kernel-common")


def build(player: Player, repository: str, name: str, version: str, depends: str = "dpkg") -> str:
    """A package in a repository of the host's own file system; returns the path of the file."""
    text = base64.b64encode(CONTROL.format(name=name, version=version, depends=depends).encode()).decode()
    folder, work = f"/srv/{repository}", f"/root/build/{name}"
    player.sh(f"mkdir -p {folder} {work}/DEBIAN; echo {text} | base64 -d > {work}/DEBIAN/control")
    player.sh(f"dpkg-deb --root-owner-group -b {work} {folder}/")
    return f"{folder}/{name}_{version}_amd64.deb"


def index(player: Player, repository: str) -> None:
    """List the repository's packages, and add it to the host's sources."""
    fields = (
        "dpkg-deb -f $f; echo Filename: ./$f; echo Size: $(stat -c %s $f); echo SHA256: $(sha256sum < $f|cut -c-64)"
    )
    player.sh(f"cd /srv/{repository} && for f in *.deb; do {fields}; echo; done > Packages")
    player.sh(f"echo 'deb [trusted=yes] file:/srv/{repository} ./' > /etc/apt/sources.list.d/{repository}.list")


@pytest.mark.case("driver-branch-change-held-broken")
def test_held_broken_packages_is_told_as_the_source_that_wins(player: Player) -> None:
    """Nothing is held: the archive's older part outranks the vendor's, as a pin of the site wants it."""
    new = "580.65.06-0ubuntu1"
    for part in PARTS_580:
        build(player, "vendor", f"{part}-580", new)
    needs = [f"{part}-580 (= {new})" for part in PARTS_580] + ["nvidia-firmware-core (>= 580.65.06)"]
    build(player, "vendor", "nvidia-driver-580", new, ", ".join(needs))
    build(player, "vendor", "nvidia-firmware-core", "580.95.05-1")
    build(player, "archive", "nvidia-firmware-core", "580.50-0ubuntu1")
    for repository in ("vendor", "archive"):
        index(player, repository)
    pin = "Package: nvidia-firmware-core\nPin: version 580.50-*\nPin-Priority: 600\n"
    player.sh(f"printf '{pin}' > /etc/apt/preferences.d/site; apt-get -q update")
    before = player.sh("dpkg-query -W")
    said = player.until("preflight_apt", "apply", {"wanted": {"driver": "580.65.06"}})
    assert said["state"] == "not_done", said
    assert "nvidia-driver-580 : Depends: nvidia-firmware-core (>= 580.65.06) but 580.50-0ubuntu1" in said["why"], said
    wins = "nvidia-firmware-core: candidate 580.50-0ubuntu1 (file:/srv/archive at priority 600) wins over 580.95.05-1"
    assert wins in said["why"] and "(file:/srv/vendor at priority 500)" in said["why"], said
    player.sh("rm /etc/apt/preferences.d/site")
    fine = player.until("preflight_apt", "apply", {"wanted": {"driver": "580.65.06"}})
    assert fine["state"] == "done" and fine["transaction"]["install"]["nvidia-firmware-core"] == "580.95.05-1", fine
    assert player.sh("dpkg-query -W") == before


@pytest.mark.case("same-branch-two-repos-suffix-conflict")
def test_a_driver_of_two_builds_is_shown_as_a_table_and_left_alone(player: Player) -> None:
    other = "550.54.15-0ubuntu0.22.04.2"
    file = build(player, "archive", "nvidia-kernel-common-550", other)
    index(player, "archive")
    player.sh(f"apt-get -q update; dpkg -i --force-depends --force-confold {file}")
    before = player.sh("dpkg-query -W -f='${Package} ${Version} ${Status}\\n'")
    steps = Steps(player, driver=WANTED)
    said = steps.step("preflight/host")
    assert said.outcome == "reject", said
    assert f"nvidia-kernel-common-550 {other} from file:/srv/archive" in said.why, said
    assert "nvidia-dkms-550 550.54.15-0ubuntu1 from http://" in said.why
    assert "unmet dependencies: " in said.why and "nvidia-kernel-common-550 (= 550.54.15-0ubuntu1)" in said.why, said
    assert player.sh("dpkg-query -W -f='${Package} ${Version} ${Status}\\n'") == before
    branch = player.until("preflight_apt", "apply", {"wanted": {"driver": "570"}})
    assert branch["state"] == "not_done" and "write the one that is meant in the plan" in branch["why"], branch


@pytest.mark.case("ansible-apt-upgrade-drops-holds")
def test_a_hold_that_gets_lost_in_the_step_is_put_back_and_said(player: Player) -> None:
    """On the way there and on the way back; a held package that the plan does not name never moves."""
    player.sh("apt-mark hold nvidia-driver-550 libcudnn9-cuda-12")
    drop = "sed -i 's/^Status: hold ok installed/Status: install ok installed/' /var/lib/dpkg/status"
    hook = f'DPkg::Post-Invoke {{ "{drop}"; }};'
    player.sh(f"echo {base64.b64encode(hook.encode()).decode()} | base64 -d > /etc/apt/apt.conf.d/99site")
    steps = Steps(player, **TOOLKIT)
    for key in ("preflight/apt", "backup/packages", "stack/apt"):
        done = steps.step(key, **(TOOLKIT if key == "stack/apt" else {}))
        assert done.outcome == "accept", done
    assert "hold on libcudnn9-cuda-12, nvidia-driver-550 changed by this step: restored" in done.findings, done
    assert player.sh("apt-mark showhold").split() == ["libcudnn9-cuda-12", "nvidia-driver-550"]
    assert steps.step("stack/apt", "undo", **TOOLKIT).outcome == "accept"
    assert player.sh("apt-mark showhold").split() == ["libcudnn9-cuda-12", "nvidia-driver-550"]
    assert OLD in player.sh("dpkg-query -W nvidia-driver-550")


# ------------------------------------------------------------------------------------------------ questions to nobody


@contextmanager
def somebody_elses_apt(player: Player) -> Iterator[None]:
    """A playbook that was killed has left apt and a dialog behind."""
    player.host.break_("apt-hangs")
    since = ledger_length(player)
    parts = ("nvidia-container-toolkit", "nvidia-container-toolkit-base", "libnvidia-container-tools")
    named = " ".join(f"{part}=1.17.8-1" for part in (*parts, "libnvidia-container1"))
    install = f"apt-get -q update; apt-get -y -q install {named}"
    player.sh(f"setsid --fork sh -c '{install}' > /root/orphan.log 2>&1 < /dev/null")
    wait_until(lambda: ledger_length(player) > since + 2, timeout=60, what="the orphan to be at work")
    yield
    player.host.mend("apt-hangs")
    wait_until(lambda: player.sh("pgrep -x apt-get || true") == "", timeout=60, what="the orphan to end")


@pytest.mark.case("apt-prompt-leaves-orphan-dpkg")
def test_an_orphan_at_work_is_named_and_no_second_apt_is_started(player: Player) -> None:
    args = prepare(player, TOOLKIT)
    with somebody_elses_apt(player):
        look = player.until("preflight_apt", "apply", {"wanted": TOOLKIT})
        assert look["state"] == "not_done" and "dpkg is in use by pid " in look["why"], look
        assert ".postinst (pid " in look["why"] and "waiting for input" in look["why"], look
        said = player.play("stack_apt", "apply", args)
        assert said["state"] == "running" and said["blocked"], said
        assert "another package operation is active on this host: pid " in said["why"], said
        assert "not starting another" in said["why"] and player.sh("pgrep -cx apt-get").strip() == "1"
        held = Steps(player, **TOOLKIT).step("stack/apt", "probe", **TOOLKIT)
        assert held.outcome != "accept"
    done = player.until("stack_apt", "apply", args)
    assert done["state"] == "done" and player.sh("dpkg --audit") == "", done
