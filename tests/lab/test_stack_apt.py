"""preflight/apt, backup/packages and stack/apt on real lab hosts: exact there and back, crashes, broken hosts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from playing import Player, kill_tree

from gpuchange.lab import Lab
from gpuchange.waiting import wait_until

NEW = {"driver": "570.172.08", "cuda": "12.8.1", "cudnn": "9.8.0", "container_toolkit": "1.17.8"}
LEDGER = "/var/log/gpuchange-lab/packages.log"
STATE = "/var/lib/gpuchange"
FILES = "; find /var/lib /var/cache /run/gpuchange -type f -print0 | sort -z | xargs -0r ls -l"
EVERYTHING = (
    "dpkg-query -W -f='${Package} ${Version} ${db:Status-Abbrev}\\n'; apt-mark showhold; apt-mark showauto;"
    "update-alternatives --query cuda; update-alternatives --query libcudnn; systemctl list-unit-files;"
    "find /etc /usr /lib/modules -type f ! -path '*/__pycache__/*' -print0 | sort -z | xargs -0 sha256sum"
)


@pytest.fixture
def player(lab: Lab, request: pytest.FixtureRequest) -> Player:
    """A fresh host and a change of its own."""
    host = lab.host("gpu2")
    host.restore("start")
    return Player(lab, "gpu2", "t-" + request.node.name[:40].replace("_", "-"))


def prepare(player: Player, wanted: dict[str, str] | None = None) -> dict[str, Any]:
    """Preflight and backup; the transaction as stack's arguments."""
    chosen = player.until("preflight_apt", "apply", {"wanted": wanted or NEW})
    assert chosen["state"] == "done", chosen
    kept = player.until("backup_packages", "apply", {"transaction": chosen["transaction"]})
    assert kept["state"] == "done" and kept["not_obtainable"] == [], kept
    return {"transaction": chosen["transaction"]}


def configured(player: Player, since: int) -> Counter[str]:
    """How often each package was configured since line `since` of the host's ledger."""
    lines = player.sh(f"tail -n +{since + 1} {LEDGER}").splitlines()
    return Counter(line.split()[1] for line in lines if " postinst configure" in line)


def ledger_length(player: Player) -> int:
    return int(player.sh(f"wc -l < {LEDGER}"))


@pytest.mark.case("rollback-impossible-old-deb-gone")
def test_there_and_back_exactly_and_without_a_network(player: Player) -> None:
    """Case: rollback-impossible-old-deb-gone."""
    player.sh("apt-mark hold nvidia-driver-550 libcudnn9-cuda-12 bash; apt-mark auto nvidia-utils-550")
    before, boots, since = player.sh(EVERYTHING), player.host.boots, ledger_length(player)
    args = prepare(player)
    player.sh("sed -i s/8099/9/ /etc/apt/sources.list.d/*; rm -rf /var/lib/apt/lists/*Packages")
    there = player.until("stack_apt", "apply", args)
    assert there["state"] == "done", there
    assert there["driver"]["loaded"] == "570.172.08" and player.host.boots == boots + 1
    assert there["holds"] == ["bash", "libcudnn9-cuda-12", "nvidia-driver-570"]
    assert "nvidia-utils-570" in player.sh("apt-mark showauto") and there["alternatives"]["cuda"]["mode"] == "auto"
    assert player.sh("readlink -f /usr/local/cuda").strip() == "/usr/local/cuda-12.8"
    assert set(configured(player, since).values()) == {1}
    assert player.play("stack_apt", "probe", args)["state"] == "done"
    again = player.until("stack_apt", "apply", args)
    assert (again["state"], again["changed"]) == ("done", False) and player.host.boots == boots + 1
    back = player.until("stack_apt", "undo", args, "undo")
    assert back["state"] == "done", back
    player.sh("sed -i s/:9/:8099/ /etc/apt/sources.list.d/*")
    assert player.sh(EVERYTHING) == before and player.host.boots == boots + 2


@pytest.mark.case("check-mode-takes-the-other-branch")
def test_look_leaves_no_trace_and_a_second_one_finds_all_as_wanted(player: Player) -> None:
    before = player.sh(EVERYTHING + FILES)
    old = {"driver": "550.54.15", "cuda": "12.4.1", "cudnn": "9.1.0", "container_toolkit": "1.16.2"}
    look = player.until("preflight_apt", "apply", {"wanted": old})
    assert (look["state"], look["as_wanted"], look["moves"]) == ("done", True, [])
    other = player.until("preflight_apt", "apply", {"wanted": NEW})
    assert not other["as_wanted"] and other["before"]["cuda"] == "12.4.1" and other["reboot_needed"]
    assert player.sh(EVERYTHING + FILES) == before


@pytest.mark.case("apt-prompt-leaves-orphan-dpkg")
def test_a_controller_killed_in_the_middle_finds_its_transaction_again(player: Player) -> None:
    """Case: async-job-file-vanishes, apt-prompt-leaves-orphan-dpkg."""
    args, since, boots = prepare(player), ledger_length(player), player.host.boots
    player.host.break_("apt-hangs")
    process = player.start("stack_apt", "apply", args)
    wait_until(lambda: ledger_length(player) > since, timeout=60, what="the transaction to begin")
    kill_tree(process)
    said = player.play("stack_apt", "probe", args)
    assert said["state"] == "running", said
    said = player.play("stack_apt", "apply", args)
    assert said["state"] == "running", said
    assert f"apt step of change {player.change} still active on this host since" in said["why"], said
    assert ".postinst (pid " in said["why"] and "waiting for input); not starting another" in said["why"], said
    assert player.sh("pgrep -cx apt-get").strip() == "1"
    player.host.mend("apt-hangs")
    done = player.until("stack_apt", "apply", args)
    assert done["state"] == "done" and player.host.boots == boots + 1, done
    assert set(configured(player, since).values()) == {1}


def test_turned_back_in_the_middle_waits_for_the_running_transaction(player: Player) -> None:
    before, boots = player.sh(EVERYTHING), player.host.boots
    args, since = prepare(player), ledger_length(player)
    player.host.break_("apt-hangs")
    process = player.start("stack_apt", "apply", args)
    wait_until(lambda: ledger_length(player) > since, timeout=60, what="the transaction to begin")
    kill_tree(process)
    said = player.play("stack_apt", "undo", args, "undo")
    assert said["state"] == "running" and "of the other direction still runs" in said["why"], said
    player.host.mend("apt-hangs")
    back = player.until("stack_apt", "undo", args, "undo")
    assert back["state"] == "done" and player.host.boots == boots, back
    assert player.sh(EVERYTHING) == before


def test_a_question_nobody_answers_ends_at_the_deadline_and_an_operators_retry_completes(player: Player) -> None:
    """Case: apt-prompt-leaves-orphan-dpkg."""
    args, boots = prepare(player, {"container_toolkit": "1.17.8"}), player.host.boots
    player.host.break_("apt-hangs")
    late = player.until("stack_apt", "apply", {**args, "deadline_s": 5})
    assert late["state"] == "not_done" and "did not end within its deadline" in late["why"], late
    player.host.mend("apt-hangs")
    same = player.until("stack_apt", "apply", args)
    assert same["state"] == "not_done", "only an operator's retry starts the transaction anew"
    again = player.until("stack_apt", "apply", {**args, "generation": 1})
    assert again["state"] == "done" and player.host.boots == boots, again
    assert player.sh("dpkg --audit") == ""


@pytest.mark.case("interrupted-dpkg-reboot-loop", "async-job-file-vanishes")
def test_a_power_cut_inside_dpkg_is_repaired_once_and_completed(player: Player) -> None:
    """Case: interrupted-dpkg-reboot-loop."""
    player.sh("apt-mark hold nvidia-driver-550")
    args, since, boots = prepare(player), ledger_length(player), player.host.boots
    player.host.break_("apt-hangs")
    process = player.start("stack_apt", "apply", args)
    wait_until(lambda: ledger_length(player) > since, timeout=60, what="the transaction to begin")
    wait_until(lambda: player.sh("dpkg --audit").strip() != "", timeout=60, what="dpkg to be in the middle")
    player.host.power("cut")
    kill_tree(process)
    player.host.power("on")
    player.host.wait_ready()
    player.host.mend("apt-hangs")
    done = player.until("stack_apt", "apply", args)
    assert done["state"] == "done" and done["holds"] == ["nvidia-driver-570"], done
    assert done["repaired"] == ["previous attempt was interrupted inside dpkg; repaired with configure -a"]
    assert player.sh("dpkg --audit") == ""
    assert player.host.boots - boots in (1, 2)  # after the power cut, and once more if the old driver was loaded then
    assert {"stack-do-install.log", "stack-do-complete.log"} <= set(player.sh(f"ls {STATE}/{player.change}").split())


def test_a_module_that_does_not_build_fails_without_a_reboot_and_rolls_back(player: Player) -> None:
    before, boots = player.sh(EVERYTHING), player.host.boots
    args = prepare(player)
    player.host.break_("driver-build-fails")
    bad = player.until("stack_apt", "apply", args)
    assert bad["state"] == "not_done" and "no nvidia module 570.172.08 exists for kernel" in bad["why"], bad
    assert player.host.boots == boots
    back = player.until("stack_apt", "undo", args, "undo")
    assert back["state"] == "done" and player.host.boots == boots, back
    player.host.mend("driver-build-fails")
    assert player.sh(EVERYTHING) == before


def test_only_what_the_plan_names_moves(player: Player) -> None:
    """Case: ansible-apt-upgrade-drops-holds."""
    player.sh("apt-mark hold nvidia-driver-550 libcudnn9-cuda-12")
    boots = player.host.boots
    args = prepare(player, {"container_toolkit": "1.17.8"})
    assert all("container" in name for name in args["transaction"]["install"])
    done = player.until("stack_apt", "apply", args)
    assert done["state"] == "done" and done["holds"] == ["libcudnn9-cuda-12", "nvidia-driver-550"], done
    assert player.host.boots == boots and "550.54.15" in player.sh("cat /proc/driver/nvidia/version")


def test_preflight_says_what_is_in_the_way(player: Player) -> None:
    missing = player.until("preflight_apt", "apply", {"wanted": {"driver": "570.999.1"}})
    assert missing["state"] == "not_done" and "offered: 570.124.06-0ubuntu1, 570.172.08-0ubuntu1" in missing["why"]
    player.host.break_("dpkg-interrupted")
    half = player.until("preflight_apt", "apply", {"wanted": NEW})
    assert half["state"] == "not_done" and "dpkg is half-done" in half["why"], half
    player.host.mend("dpkg-interrupted")
    player.sh("sed -i s/8099/9/ /etc/apt/sources.list.d/*")
    dark = player.until("preflight_apt", "apply", {"wanted": NEW})
    assert dark["state"] == "not_done" and "package sources cannot be read" in dark["why"], dark


@pytest.mark.case("rollback-impossible-old-deb-gone")
def test_an_old_package_that_is_nowhere_to_be_had_is_named_before_anything_moves(player: Player) -> None:
    """Case: rollback-impossible-old-deb-gone."""
    player.host.break_("repo-old-gone")
    chosen = player.until("preflight_apt", "apply", {"wanted": NEW})
    assert chosen["state"] == "done" and "nvidia-driver-550 550.54.15-0ubuntu1" in chosen["not_obtainable"], chosen
    kept = player.until("backup_packages", "apply", {"transaction": chosen["transaction"]})
    assert "cannot guarantee rollback for" in kept["irreversible"] and kept["state"] == "done", kept


@pytest.mark.case("alternatives-chain-behind-usr-local-cuda")
def test_a_toolkit_chosen_by_hand_stays_active_and_keeps_its_mode(player: Player) -> None:
    """Case: alternatives-chain-behind-usr-local-cuda."""
    player.sh("update-alternatives --set cuda /usr/local/cuda-12.4")
    args = prepare(player, {"cuda": "12.8.1"})
    done = player.until("stack_apt", "apply", args)
    assert done["alternatives"]["cuda"] == {"mode": "manual", "value": "/usr/local/cuda-12.4"}, done
    switched = player.until("stack_apt", "apply", {**args, "cuda_select": True})
    assert switched["alternatives"]["cuda"] == {"mode": "manual", "value": "/usr/local/cuda-12.8"}
    back = player.until("stack_apt", "undo", args, "undo")
    assert back["alternatives"]["cuda"] == {"mode": "manual", "value": "/usr/local/cuda-12.4"}, back


def test_another_change_is_locked_out_and_releases_by_name_only(player: Player) -> None:
    args = prepare(player, {"container_toolkit": "1.17.8"})
    other = Player(player.lab, player.name, "other", fence=9)
    refused = other.play("stack_apt", "apply", args)
    assert refused["state"] == "failed" and refused["refused"]["kind"] == "locked", refused
    assert other.play("owner_marker", "apply", {})["refused"]["by"]["change"] == player.change
    newer = Player(player.lab, player.name, player.change, fence=2)
    assert newer.until("stack_apt", "apply", args)["state"] == "done"
    assert player.play("stack_apt", "apply", args)["refused"]["kind"] == "stale"
    assert newer.play("owner_marker", "apply", {})["released"] is True
    assert set(player.sh(f"ls {STATE}").split()) == {player.change, "lock"}
