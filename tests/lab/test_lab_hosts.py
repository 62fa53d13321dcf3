"""The lab itself on real hosts: power, cables, disks, faults, several labs at once, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpuchange.errors import LabError
from gpuchange.lab import Host, Lab, cgroups, network, orders, pool, state
from gpuchange.lab.load import Load
from gpuchange.waiting import wait_until


def boot_id(host: Host) -> str:
    return host.run(["cat", "/proc/sys/kernel/random/boot_id"]).strip()


def over_ssh(host: Host, command: str, timeout: float = 30) -> subprocess.CompletedProcess[str]:
    return subprocess.run(host.ssh(command), capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL)


def for_seconds(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() >= end


def test_hosts_are_whole_systems_with_working_gpus(fresh_hosts: Lab) -> None:
    for host in fresh_hosts.gpu_hosts:
        wait_until(lambda h=host: h.run(["systemctl", "is-system-running"], check=False).strip() == "running",
                   timeout=30, what=f"{host.name} to be up whole")  # fmt: skip
        assert host.run(["nvidia-smi", "-L"]).count("NVIDIA H100") == 2
        assert host.run(["hostname"]).strip() == host.name
    assert fresh_hosts.serving() == {"gpu1": "UP", "gpu2": "UP", "gpu3": "UP"}


def test_machine_ids_and_host_keys_differ(lab: Lab) -> None:
    for path in ("/etc/machine-id", "/etc/ssh/ssh_host_ed25519_key.pub"):
        assert len({host.run(["cat", path]) for host in lab.hosts}) == 4


def test_the_way_out_is_closed(lab: Lab) -> None:
    """A host reaches its lab and nothing else."""
    routes = lab.host("gpu1").run(["ip", "route"])
    assert "default" not in routes
    assert lab.host("gpu1").run(["ip", "-6", "route", "show", "default"]) == ""


@pytest.mark.case("ipv6-host-in-rsync-step")
def test_ssh_answers_with_the_pinned_key_over_both_families(lab: Lab) -> None:
    host = lab.host("gpu1")
    assert over_ssh(host, "hostname").stdout.strip() == "gpu1"
    line = [word.replace(host.address, host.spec.address6(host.layout)) for word in host.ssh("hostname")]
    assert subprocess.run(line, capture_output=True, text=True).stdout.strip() == "gpu1"


def test_packages_come_from_the_lab_alone(lab: Lab) -> None:
    text = lab.host("gpu2").run(["sh", "-c", "apt-get update -q && apt-cache policy nvidia-driver-570"])
    assert "apt.lab" in text and "570." in text


def test_reboot_from_inside(lab: Lab) -> None:
    host = lab.host("gpu1")
    before, boots = boot_id(host), host.boots
    host.run(["touch", "/srv/kept"])
    over_ssh(host, "systemctl reboot")
    wait_until(lambda: host.boots == boots + 1, timeout=30, what="the reboot")
    host.wait_ready()
    assert boot_id(host) != before
    assert host.run(["ls", "/srv/kept"]).strip() == "/srv/kept"


def test_power_button_cut_and_cycle(lab: Lab) -> None:
    host = lab.host("gpu1")
    for switch in ("off", "cut"):
        host.power(switch)  # type: ignore[arg-type]
        assert host.status()["power"] == "off"
        with pytest.raises(LabError, match="the host is off"):
            host.run(["true"])
        host.power("on")
        host.wait_ready()
    before = boot_id(host)
    host.power("cycle")
    host.wait_ready()
    assert boot_id(host) != before


def test_poweroff_from_inside_stays_off(fresh_hosts: Lab) -> None:
    host = fresh_hosts.host("gpu2")
    over_ssh(host, "systemctl poweroff")
    wait_until(lambda: host.status()["power"] == "off", timeout=30, what="the host to be off")


def test_a_frozen_host_can_be_cut(fresh_hosts: Lab) -> None:
    host = fresh_hosts.host("gpu2")
    host.freeze()
    assert not host.ssh_answers()
    host.power("cut")
    assert not cgroups.processes(host.spec.bridge, host.name)
    host.power("on")
    host.wait_ready()
    assert not host.status()["frozen"]


@pytest.mark.parametrize("fault", ["hang", "network-cut", "power-cut", "ssh-down"])
def test_faults_that_cut_a_host_off_and_mend(fresh_hosts: Lab, fault: str) -> None:
    host = fresh_hosts.host("gpu3")
    for _ in range(2):  # twice is the same as once
        host.break_(fault)
    assert not host.ssh_answers()
    assert host.staged_faults() == [fault]
    for _ in range(2):
        host.mend(fault)
    host.wait_ready()
    assert host.staged_faults() == []
    fresh_hosts.wait_serving()


def test_a_pulled_cable_stays_out_over_a_reboot(fresh_hosts: Lab) -> None:
    host = fresh_hosts.host("gpu1")
    host.unplug()
    host.run(["systemctl", "reboot"], check=False)
    wait_until(lambda: host.boots >= 2 and host.status()["leader"], timeout=30, what="the reboot")
    wait_until(lambda: host.run(["systemctl", "is-active", "ssh"], check=False) == "active\n", timeout=30, what="sshd")
    assert not host.ssh_answers()
    host.plug()
    host.wait_ready()


def test_a_full_disk_stays_full_over_a_reboot_and_loses_nothing(fresh_hosts: Lab) -> None:
    host = fresh_hosts.host("gpu1")
    grow = ["sh", "-c", "head -c 200000 /dev/zero > /var/lib/grown"]
    host.break_("disk-full")
    with pytest.raises(LabError, match="No space left"):
        host.run(grow)
    boots = host.boots
    host.run(["systemctl", "reboot"], check=False)
    wait_until(lambda: host.boots == boots + 1, timeout=30, what="the reboot")
    host.wait_ready()
    with pytest.raises(LabError, match="No space left"):
        host.run(grow)
    host.run(["mkdir", "/var/lib/made-while-full"])
    host.mend("disk-full")
    host.run(grow)
    host.run(["ls", "/var/lib/made-while-full", "/var/lib/dpkg/status"])
    assert (host.root / "var/lib/grown").stat().st_size == 200000


def test_restore_undoes_everything_and_faults(fresh_hosts: Lab) -> None:
    host = fresh_hosts.host("gpu1")
    host.run(["rm", "-rf", "/etc/ssh", "/usr/bin/apt-get"])
    host.break_("network-cut")
    host.restore("start")
    host.run(["ls", "/usr/bin/apt-get"])
    assert host.staged_faults() == [] and host.status()["plugged"]


def test_snapshot_keeps_a_moment(fresh_hosts: Lab) -> None:
    host = fresh_hosts.host("gpu2")
    host.run(["sh", "-c", "echo one > /srv/word && sync"])
    host.snapshot("moment")
    host.run(["sh", "-c", "echo two > /srv/word"])
    host.restore("moment")
    assert host.run(["cat", "/srv/word"]) == "one\n"


def test_load_counts_what_fails(lab: Lab) -> None:
    lab.wait_serving()
    calm = Load(lab.lb_url, rate=60, stream_every=2, stream_seconds=3).run(for_seconds(6))
    assert calm.failed == 0 and calm.streams_ok >= 3
    assert calm.summary()["per_second"] >= 50
    assert set(calm.by_host) == {"gpu1", "gpu2", "gpu3"}


def test_load_counts_a_server_that_dies(fresh_hosts: Lab) -> None:
    """The control: without a drain, stopping one model server costs requests and open streams."""
    with ThreadPoolExecutor(1) as aside:
        running = aside.submit(Load(fresh_hosts.lb_url, rate=60, stream_every=0.3).run, for_seconds(6))
        wait_until(for_seconds(2), timeout=10, what="some streams to be open")
        fresh_hosts.host("gpu1").run(["systemctl", "stop", "modelserver"])
        tally = running.result()
    assert tally.failed > 0 and tally.streams_failed > 0
    assert tally.reasons


def test_a_drained_server_costs_nothing(fresh_hosts: Lab) -> None:
    def idle() -> bool:
        row = next(line for line in fresh_hosts.haproxy("show stat").splitlines() if line.startswith("gpu,gpu1,"))
        return row.split(",")[4] == "0"

    with ThreadPoolExecutor(1) as aside:
        running = aside.submit(Load(fresh_hosts.lb_url, rate=60, stream_every=0.5).run, for_seconds(12))
        wait_until(for_seconds(2), timeout=10, what="some streams to be open")
        fresh_hosts.haproxy("set server gpu/gpu1 state drain")
        wait_until(idle, timeout=15, what="gpu1's connections to end")
        fresh_hosts.host("gpu1").run(["systemctl", "stop", "modelserver"])
        tally = running.result()
    assert tally.failed == 0, tally.reasons


def left_behind(lab: Lab) -> list[str]:
    """Whatever of a lab is still on the machine."""
    found = [line for line in Path("/proc/mounts").read_text().splitlines() if f"/labs/{lab.name}/" in line]
    found += [link for link in network.links() if lab.spec.bridge in link.split("-")]
    found += [str(group) for group in cgroups.groups(lab.spec.bridge) if group.exists()]
    found += [str(path) for path in (lab.spec.directory, lab.spec.subvolumes) if path.exists()]
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = cmdline.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"gpuchange.lab.power" in words and lab.name.encode() in words:
            found.append(f"power daemon {cmdline.parent.name}")
    return found


def test_two_labs_at_once_and_nothing_left_behind(lab: Lab) -> None:
    name = f"{lab.name[:20]}-other"
    other = Lab.up(name, hosts=1, gpus=1)
    assert other.spec.bridge != lab.spec.bridge
    assert other.serving() == {"gpu1": "UP"}
    assert other.host("gpu1").run(["nvidia-smi", "-L"]).count("GPU ") == 1
    with pytest.raises(LabError, match="1 GPU hosts of 1 cards"):
        Lab.up(name, hosts=2, gpus=1)
    other.host("gpu1").break_("disk-full")
    other.host("lb1").freeze()
    other.down()
    assert left_behind(other) == []
    assert lab.status()["hosts"]["gpu1"]["power"] == "on"


def test_a_killed_power_daemon_is_replaced(lab: Lab) -> None:
    name = f"{lab.name[:20]}-killed"
    other = Lab.up(name, hosts=1, gpus=1)
    try:
        other.host("gpu1").run(["sh", "-c", "echo kept > /srv/word; sync"])
        os.kill(orders.daemon_pid(other.spec), signal.SIGKILL)
        with pytest.raises(LabError, match="power daemon of lab"):
            other.status()
        again = Lab.up(name, hosts=1, gpus=1)
        assert again.host("gpu1").run(["cat", "/srv/word"]) == "kept\n"
        os.kill(orders.daemon_pid(other.spec), signal.SIGKILL)
    finally:
        other.down()
    assert left_behind(other) == []


@pytest.mark.parametrize("step", [(network, "open_bridge"), (network, "raise_limits"), (orders, "start_daemon")])
def test_a_failed_up_leaves_nothing(lab: Lab, monkeypatch: pytest.MonkeyPatch, step: tuple[object, str]) -> None:
    def refuse(*_: object) -> None:
        raise LabError("not today")

    monkeypatch.setattr(*step, refuse)
    name, bridges = f"{lab.name[:20]}-failed", network.links()
    with pytest.raises(LabError, match="not today"):
        Lab.up(name, hosts=1, gpus=1)
    assert not state.exists(name)
    assert not (state.pool() / "labs" / name).exists()
    assert not [link for link in network.links() - bridges if network.owner(link).endswith(f"/{name}")]


def test_labs_of_other_directories_never_share_a_bridge(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lab under another state directory takes another number, and its end leaves ours alone."""
    monkeypatch.setenv("GPUCHANGE_LAB_DIR", str(tmp_path))
    index = network.claim_index(tmp_path / "labs" / "x", set())
    stranger = state.LabSpec("x", index, 1, state.plan_hosts(1))
    try:
        assert index != lab.spec.index
        assert network.owner(stranger.bridge) == str(tmp_path / "labs" / "x")
        with pytest.raises(LabError, match="now belongs to"):
            network.open_bridge(state.LabSpec("x", lab.spec.index, 1, stranger.hosts))
    finally:
        network.remove_bridge(stranger)


def test_hosts_copied_from_one_image_share_its_blocks(lab: Lab) -> None:
    """A host costs next to no space and time, else labs of many hosts would not do."""
    began = time.monotonic()
    pool.snapshot(lab.host("gpu1").root, lab.spec.subvolumes / "probe")
    try:
        assert time.monotonic() - began < 5
    finally:
        pool.delete(lab.spec.subvolumes / "probe")
