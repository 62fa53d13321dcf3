"""A bundle on real hosts: applied once as it was reviewed, refused after a reboot, a card swap or another driver."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from changes import NEW_DRIVER, OLD_DRIVER, Operator, boot_id, drained, ledger, loaded_driver, owner_marker, since

from gpuchange.lab import Lab
from gpuchange.lab.gpu import CARDS_FILE


def key(directory: Path, name: str) -> Path:
    path = directory / name
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
    return path


@pytest.mark.timeout(600)
def test_a_reboot_and_a_card_swap_since_the_review_are_refused(fresh_hosts: Lab, tmp_path: Path) -> None:
    operator, lab = Operator(fresh_hosts, tmp_path), fresh_hosts
    bundle, ledgers = str(tmp_path / "change.bundle"), [ledger(host) for host in lab.gpu_hosts]
    gpu1, gpu2, _ = lab.gpu_hosts
    operator.run("plan", operator.plan(rollout={"canary": 0}), "-o", bundle, "--author", "alice").ended(0)
    booted, card = boot_id(gpu1), json.loads((gpu2.root / CARDS_FILE).read_text())
    old, card["cards"][0]["uuid"] = card["cards"][0]["uuid"], "GPU-11111111-2222-4333-8444-555555555555"
    (gpu2.root / CARDS_FILE).write_text(json.dumps(card))
    for host in (gpu1, gpu2):
        host.power("cycle")
        host.wait_ready()
    refused = operator.run("apply", bundle, "--yes").ended(8)
    assert f"host gpu1: boot-id was {booted}, is {boot_id(gpu1)} (it was rebooted)" in refused.err
    assert f"was {old}, is {card['cards'][0]['uuid']}" in refused.err
    assert "host gpu3" not in refused.err
    gained = [since(then, ledger(host)) for then, host in zip(ledgers, lab.gpu_hosts, strict=True)]
    assert [one["packages"] for one in gained] == [[]] * 3
    assert not any(owner_marker(host) for host in lab.hosts)


@pytest.mark.timeout(900)
def test_an_approved_bundle_is_applied_once(fresh_hosts: Lab, tmp_path: Path) -> None:
    operator, gpu3 = Operator(fresh_hosts, tmp_path), fresh_hosts.gpu_hosts[2]
    bundle, second = str(tmp_path / "change.bundle"), str(tmp_path / "second.bundle")
    plan = operator.plan("one", hosts=["gpu3"], rollout={"canary": 0}, baseline={"mode": "skip"})
    for path in (bundle, second):
        operator.run("plan", plan, "-o", path, "--author", "alice").ended(0)
    bob = key(tmp_path, "bob")
    (tmp_path / "signers").write_text(f"bob {Path(f'{bob}.pub').read_text()}")
    required = ("--require-approvals", "1", "--allowed-signers", str(tmp_path / "signers"))
    operator.run("apply", bundle, "--yes", *required).ended(8)
    operator.run("approve", bundle, "--key", str(bob), "--as", "bob", "--yes").ended(0)
    operator.run("apply", bundle, "--yes", *required).ended(0)
    assert loaded_driver(gpu3) == NEW_DRIVER
    assert drained(operator.events()) == ["gpu3"]
    again = operator.run("apply", bundle, "--yes", *required).ended(8)
    assert f"already applied as change {operator.change().name}" in again.err
    stale = operator.run("apply", second, "--yes").ended(8)
    assert f"host gpu3: driver was {OLD_DRIVER}, is {NEW_DRIVER}" in stale.err
    (tmp_path / "heads").write_text(operator.run("audit", "head").ended(0).out)
    assert "kept elsewhere" in operator.run("audit", "verify", "--head", str(tmp_path / "heads")).ended(0).out
