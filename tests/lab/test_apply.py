"""A whole change on real hosts under load; applied again; taken back again."""

from __future__ import annotations

from pathlib import Path

import pytest
from changes import (
    NEW_DRIVER,
    OLD_DRIVER,
    Operator,
    differences,
    drained,
    fingerprints,
    ledger,
    loaded_driver,
    most_out,
    owner_marker,
    since,
    under_load,
)

from gpuchange.lab import Lab
from gpuchange.states import Event, Kind

HOSTS = ["gpu1", "gpu2", "gpu3"]


@pytest.mark.timeout(3000)
def test_a_change_goes_through_under_load_is_not_repeated_and_can_be_taken_back(
    fresh_hosts: Lab, tmp_path: Path
) -> None:
    """One lab, one story: its parts need one another's end, and each whole change costs a minute."""
    operator, lab = Operator(fresh_hosts, tmp_path), fresh_hosts
    plan = operator.plan()
    mark_packages(lab)
    before = fingerprints(lab)
    carried_out(operator, plan, before)
    applied_again(operator, plan)
    taken_back(operator, before)


def mark_packages(lab: Lab) -> None:
    """Holds and automatic marks that a change must carry over and a rollback must put back."""
    for host in lab.gpu_hosts:
        host.run(["apt-mark", "hold", "libcudnn9-cuda-12", "curl"])
        host.run(["apt-mark", "auto", "nvidia-utils-550", "cuda-cudart-12-4"])


def carried_out(operator: Operator, plan: str, before: dict[str, dict[str, list[str]]]) -> None:
    lab = operator.lab
    ledgers = {host.name: ledger(host) for host in lab.gpu_hosts}
    with under_load(lab) as watched:
        said = operator.run("apply", plan, "--yes").ended(0)
    watched.nothing_failed()
    assert watched.most_down == 1 == most_out(operator.events())
    assert drained(operator.events()) == HOSTS
    for host in lab.gpu_hosts:
        assert loaded_driver(host) == NEW_DRIVER
        gained = since(ledgers[host.name], ledger(host))
        assert len(gained["boots"]) == 1, gained["boots"]
        assert installed_once(gained["packages"], "nvidia-driver-570")
        assert not owner_marker(host)
    after = fingerprints(lab)
    assert after["HAProxy"] == before["HAProxy"]
    for host in HOSTS:
        assert after[host]["models"] == before[host]["models"]
        assert after[host]["services"] == before[host]["services"]
        assert "libcudnn9-cuda-12" in after[host]["holds"] and "curl" in after[host]["holds"]
        row = next(line for line in said.out.splitlines() if line.startswith(f"{host} ") and NEW_DRIVER in line)
        assert OLD_DRIVER in row and "done" in row


def installed_once(scripts: list[str], package: str) -> bool:
    return sum(line.startswith(f"{package} ") and " postinst configure" in line for line in scripts) == 1


def applied_again(operator: Operator, plan: str) -> None:
    """Nobody is drained for a change that is there already."""
    lab, first = operator.lab, operator.change()
    ledgers = {host.name: ledger(host) for host in lab.gpu_hosts}
    before = fingerprints(lab)
    said = operator.run("apply", plan, "--yes", timeout=400).ended(0)
    assert "every host is as the plan wants it" in said.text
    assert operator.change() != first
    assert not [event for event in operator.events() if event.phase not in ("", "preflight")]
    assert {host.name: ledger(host) for host in lab.gpu_hosts} == ledgers
    assert differences(before, fingerprints(lab)) == ""


def taken_back(operator: Operator, before: dict[str, dict[str, list[str]]]) -> None:
    lab = operator.lab
    first = min(path for path in operator.state.iterdir() if (path / "journal.db").exists())
    seen = len(operator.events(first))
    with under_load(lab) as watched:
        said = operator.run("rollback", first.name, "--yes")
    assert differences(before, fingerprints(lab)) == "", said.text
    said.ended(0)
    watched.nothing_failed()
    events = operator.events(first)
    assert watched.most_down == 1 == most_out(events[seen:])
    assert proved(events) == set(HOSTS)
    assert not any(owner_marker(host) for host in lab.gpu_hosts)


def proved(events: list[Event]) -> set[str]:
    """The hosts whose rollback was compared with their seal, line by line, and found equal."""
    return {
        event.host
        for event in events
        if (event.kind, event.phase, event.direction) == (Kind.ACCEPTED, "seal", "undo")
        and len(event.data.get("findings", ())) > 5
    }
