"""Hosts that cannot be reached: at the start, and in the middle of their change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from changes import (
    NEW_DRIVER,
    OLD_DRIVER,
    Operator,
    Said,
    differences,
    drained,
    fingerprint,
    fingerprints,
    ledger,
    loaded_driver,
    most_out,
    owner_marker,
    servers,
    since,
    under_load,
)

from gpuchange.lab import Host, Lab
from gpuchange.waiting import wait_until

TWO_AT_ONCE: dict[str, Any] = {
    "rollout": {"max_unavailable": 2, "canary": 0, "stop_after_failures": 2, "unreachable_timeout": "4s"},
    "baseline": {"mode": "skip"},
}


@pytest.mark.timeout(2500)
def test_unreachable_at_the_start_then_cut_off_in_the_middle_then_resumed(fresh_hosts: Lab, tmp_path: Path) -> None:
    operator, lab = Operator(fresh_hosts, tmp_path), fresh_hosts
    refused_at_the_start(operator)
    ledgers = {each.name: ledger(each) for each in lab.gpu_hosts}
    with under_load(lab) as watched:
        host, said = cut_off(operator, operator.plan(**TWO_AT_ONCE), "packages")
    assert_held(operator, said, host, [each for each in lab.gpu_hosts if each.name != host.name])
    watched.nothing_failed()
    assert watched.most_down == 2 == most_out(operator.events())
    host.plug()
    operator.run("resume").ended(0)
    lab.wait_serving(timeout=10)
    for each in lab.gpu_hosts:
        gained = since(ledgers[each.name], ledger(each))
        assert loaded_driver(each) == NEW_DRIVER and len(gained["boots"]) == 1, gained["boots"]
        assert len(set(gained["packages"])) == len(gained["packages"]), "a package was installed twice"
        assert not owner_marker(each)


def refused_at_the_start(operator: Operator) -> None:
    lab, plan = operator.lab, operator.plan(**TWO_AT_ONCE)
    host, ledgers = lab.host("gpu3"), {each.name: ledger(each) for each in lab.gpu_hosts}
    host.unplug()
    wait_until(lambda: lab.serving()["gpu3"] == "DOWN", timeout=30, what="HAProxy to notice")
    before = servers(lab)
    said = operator.run("apply", plan, "--yes", timeout=500).ended(4)
    assert "gpu3" in said.text and "unreachable" in said.text, said.text
    assert drained(operator.events()) == [], "a host was taken out of service"
    assert servers(lab) == before
    assert {each.name: ledger(each) for each in lab.gpu_hosts} == ledgers
    host.plug()
    lab.wait_serving()
    assert not any(owner_marker(each) for each in lab.gpu_hosts)


def cut_off(operator: Operator, plan: str, when: str) -> tuple[Host, Said]:
    """Apply `plan`; pull the cable of the first host whose ledger of `when` (packages or boots) grows, at that moment.

    Returns that host, and what was said once gpuchange had ended.
    """
    so_far = {host.name: len(ledger(host)[when]) for host in operator.lab.gpu_hosts}
    process = operator.start("apply", plan, "--yes")
    acting: list[Host] = []

    def at_work() -> bool:
        acting.extend(host for host in operator.lab.gpu_hosts if len(ledger(host)[when]) > so_far[host.name])
        return bool(acting) or process.poll() is not None

    try:
        wait_until(at_work, timeout=900, what=f"a host's {when}", interval=0.05)
        for host in acting[:1]:
            host.unplug()
    finally:
        said = operator.finish(process)
    assert acting, said.text
    return acting[0], said


def assert_held(operator: Operator, said: Said, host: Host, finished: list[Host]) -> None:
    """Exit 5, the others are done, the host stays out, and the operator is told what to do."""
    change = operator.change()
    said.ended(5)
    assert f"gpuchange resolve {change.name} {host.name}" in said.text and "unreachable" in said.text, said.text
    status = operator.run("status", timeout=120).text
    assert any(host.name in line and "held" in line for line in status.splitlines()), status
    serving = operator.lab.serving()
    assert serving[host.name] != "UP"
    for other in finished:
        assert loaded_driver(other) == NEW_DRIVER and serving[other.name] == "UP"


@pytest.mark.timeout(2000)
def test_cut_off_in_the_middle_then_taken_back(fresh_hosts: Lab, tmp_path: Path) -> None:
    """This time the cable goes during the reboot, and the operator wants the host as it was."""
    operator, lab = Operator(fresh_hosts, tmp_path), fresh_hosts
    before = fingerprints(lab)
    host, said = cut_off(operator, operator.plan(hosts=["gpu1", "gpu2"], **TWO_AT_ONCE), "boots")
    other = lab.host("gpu2" if host.name == "gpu1" else "gpu1")
    assert_held(operator, said, host, [other])
    host.plug()
    host.wait_ready()
    change = operator.change().name
    operator.run("resolve", change, host.name, "--undo", timeout=120).ended(0)
    said = operator.run("resume", change).ended(3)
    assert "rolled back" in said.text
    lab.wait_serving(timeout=10)
    assert differences(before, {**before, host.name: fingerprint(host)}) == "", said.text
    assert loaded_driver(host) == OLD_DRIVER and not owner_marker(host)
    assert loaded_driver(other) == NEW_DRIVER
