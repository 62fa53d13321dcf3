"""Looking, recording and proving on real lab hosts: nothing is touched, everything that moves is seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playing import Player, kill_tree
from stepping import PLAN, Operator

from gpuchange import providers
from gpuchange.checks.identity import same_machines
from gpuchange.checks.snapshot import parse
from gpuchange.lab import Host, Lab
from gpuchange.providers.contract import HostView
from gpuchange.waiting import wait_until

OURS = "/var/lib/gpuchange"


@pytest.fixture
def host(fresh_hosts: Lab) -> Host:
    return fresh_hosts.host("gpu1")


@pytest.fixture
def operator(fresh_hosts: Lab) -> Operator:
    return Operator(Player(fresh_hosts, "gpu1", "rec1"))


def files(host: Host) -> dict[str, tuple[int, int, int]]:
    """Every file of the host but logs and what Ansible and the system themselves keep: {path: (size, mtime, mode)}."""
    find = (
        "find / -xdev -path /var/log -prune -o -path /root/.ansible -prune -o -path /var/lib/systemd -prune -o -type f"
        r" -printf '%s %T@ %m %p\n'"
    )
    rows = (line.split(" ", 3) for line in host.run(["sh", "-c", find]).splitlines())
    return {path: (int(size), int(float(at)), int(mode, 8)) for size, at, mode, path in rows}


def test_looking_leaves_the_host_as_it_was(operator: Operator, host: Host) -> None:
    before = files(host)
    body, verdict = operator.step("preflight/host")
    for key in ("record/host", "seal/host", "verify/host", "backup/rsync"):
        params = {"paths": ["/srv/models"], "to": "/var/backup"} if key == "backup/rsync" else {}
        probed, _ = operator.step(key, "probe", **params)
        assert probed["state"] == "not_done", probed
    assert verdict.outcome == "accept", verdict
    assert files(host) == before
    assert body["errors"] == {} and body["facts"]["collected_s"] < 10  # 0.3 s on an idle machine


def test_what_is_seen_is_what_is_there(operator: Operator, host: Host) -> None:
    body, _ = operator.step("preflight/host")
    seen = parse(body["facts"])
    assert seen.machine_id == host.run(["cat", "/etc/machine-id"]).strip() == body["machine_id"]
    driver = seen.driver
    assert {driver.loaded, driver.next_boot, driver.userspace, driver.reported} == {"550.54.15"}
    assert len(seen.cards) == len(seen.pci) == 2
    assert (seen.cuda.active, seen.container_toolkit) == ("12.4.1", "1.16.2")
    assert (seen.cudnn.version or "").startswith("9.1.0") and "package libcudnn9-cuda-12" in seen.cudnn.evidence
    assert [user.unit for user in seen.gpu_users] == ["modelserver.service"]


def test_two_names_of_one_machine_are_refused(fresh_hosts: Lab) -> None:
    bodies = {name: Operator(Player(fresh_hosts, name, "rec1")).step("preflight/host")[0] for name in ("gpu1", "gpu2")}
    facts = {name: body["facts"] for name, body in bodies.items()}
    assert same_machines(facts) == {}
    found = same_machines({**facts, "gpu1-alias": facts["gpu1"]})
    assert set(found) == {"gpu1", "gpu1-alias"} and "are the same machine" in found["gpu1"]


def test_a_seal_is_proved_and_each_kind_of_difference_is_seen(operator: Operator, host: Host) -> None:
    for key in ("record/host", "seal/host"):
        _, verdict = operator.step(key)
        assert verdict.outcome == "accept", verdict
    assert operator.evidence["record/host"]["manifest"]["read_files"] > 0
    assert operator.evidence["seal/host"]["manifest"]["read_files"] == 0
    _, verdict = operator.step("seal/host", "undo")
    assert verdict.outcome == "accept", verdict
    assert any(line.startswith("manifest: checked") and "equal" in line for line in verdict.findings)
    victim = next(path for path in sorted((host.root / "srv/models").rglob("*")) if path.is_file())
    inside = "/" + str(victim.relative_to(host.root))
    host.run(["sh", "-c", f"printf X | dd of={inside} bs=1 seek=3 conv=notrunc status=none"])
    host.run(["apt-mark", "hold", "nvidia-utils-550"])
    _, verdict = operator.step("seal/host", "undo")
    assert verdict.outcome == "reject"
    assert f"1 mismatch (mismatch: {inside})" in verdict.why and "holds: 1 differ" in verdict.why


def test_a_stopped_service_and_a_lost_card_are_no_proof(operator: Operator, host: Host) -> None:
    operator.step("record/host")
    operator.step("seal/host")
    host.run(["systemctl", "stop", "modelserver.service"])
    _, verdict = operator.step("seal/host", "undo", settle="0s")
    assert verdict.outcome == "reject" and "modelserver.service should be" in verdict.why
    _, verdict = operator.step("verify/host", settle="0s")
    assert verdict.outcome == "reject" and "modelserver.service should be active" in verdict.why


def test_a_backup_is_proved_on_the_host_and_made_once(operator: Operator, host: Host) -> None:
    params: dict[str, Any] = {"paths": ["/srv/models"], "to": "/var/backup"}
    body, verdict = operator.step("backup/rsync", **params)
    assert verdict.outcome == "reject" and "/var/backup is no directory" in body["why"]
    host.run(["mkdir", "/var/backup"])
    body, verdict = operator.step("backup/rsync", **params)
    assert verdict.outcome == "accept" and body["set"]["in_flux"] == 0, verdict
    host.run(["diff", "-r", "/srv/models", "/var/backup/rec1/tree/srv/models"])
    host.run(["sh", "-c", "cd / && sha256sum --check --quiet /var/backup/rec1/manifest.sha256"])
    again, _ = operator.step("backup/rsync", **params)
    assert again["set"] == body["set"] and not again["changed"]


def test_hashing_outlives_its_controller_and_is_not_begun_twice(operator: Operator, host: Host) -> None:
    """The controller goes while the unit hashes; the next call attaches, and the hash is the host's own."""
    host.run(["sh", "-c", "head -c 300M /dev/urandom > /srv/models/large.bin"])
    player = operator.player
    provider = providers.find("record", "host")
    assert provider
    view = HostView("gpu1", PLAN, {}, direction="do")
    started = player.start("record_host", "apply", provider.args(view, "apply"))
    begun = Path(f"{host.root}{OURS}/rec1/record-do-manifest.begun")
    wait_until(begun.exists, timeout=60, what="the hashing unit to begin", interval=0.05)
    kill_tree(started)
    body, verdict = operator.step("record/host")
    assert verdict.outcome == "accept"
    listed = (host.root / OURS.lstrip("/") / "rec1/record.sha256").read_text()
    assert host.run(["sha256sum", "/srv/models/large.bin"]).strip() in listed
    assert body["manifest"]["files"] >= 2
