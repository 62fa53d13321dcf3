"""A bad new driver on one host: found by verify, taken back without a human, proved, and no further host is begun."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from changes import (
    NEW_DRIVER,
    OLD_DRIVER,
    Operator,
    boot_id,
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

PROVED = ("packages", "holds", "origins", "services", "manifest", "GPU function", "modules loaded", "cards")
"""What the proof must speak of."""


@pytest.mark.timeout(2000)
def test_a_driver_that_computes_wrong_values_is_rolled_back_and_proved(fresh_hosts: Lab, tmp_path: Path) -> None:
    operator, lab = Operator(fresh_hosts, tmp_path), fresh_hosts
    host = lab.host("gpu1")
    host.run(["apt-mark", "hold", "libcudnn9-cuda-12", "curl"])
    host.run(["apt-mark", "auto", "nvidia-utils-550", "cuda-cudart-12-4"])
    host.break_("wrong-values")
    before, ledgers = fingerprints(lab), {each.name: ledger(each) for each in lab.gpu_hosts}
    booted = {each.name: boot_id(each) for each in lab.gpu_hosts}
    with under_load(lab) as watched:
        said = operator.run("apply", operator.plan(), "--yes")
    assert differences(before, fingerprints(lab)) == "", said.text
    said.ended(3)
    watched.nothing_failed()
    events = operator.events()
    assert watched.most_down == 1 == most_out(events)
    why = rejected(events)
    assert (why.host, why.phase) == ("gpu1", "verify"), why
    assert drained(events) == ["gpu1"], "another host was begun"
    assert_said_line_by_line(operator, events)
    rows = [line.split() for line in said.out.splitlines() if line.startswith(("gpu2 ", "gpu3 "))]
    assert all("in service" in " ".join(row) for row in rows[-2:]), said.out
    gained = {each.name: since(ledgers[each.name], ledger(each)) for each in lab.gpu_hosts}
    assert len(gained["gpu1"]["boots"]) == 2, "one reboot for the new driver, one for the old"
    assert any(NEW_DRIVER in line for line in gained["gpu1"]["packages"]), "the new driver was never there"
    assert gained["gpu2"] == gained["gpu3"] == {"packages": [], "boots": []}
    assert loaded_driver(host) == OLD_DRIVER and boot_id(host) != booted["gpu1"]
    assert not any(owner_marker(each) for each in lab.gpu_hosts)


def rejected(events: list[Event]) -> Event:
    """The one verdict that turned the host."""
    found = [event for event in events if event.kind is Kind.REJECTED]
    assert len(found) == 1, found
    return found[0]


def assert_said_line_by_line(operator: Operator, events: list[Event]) -> None:
    """The proof names each thing compared, in the journal and in the report for people."""
    proof = next(e for e in events if (e.kind, e.phase, e.direction) == (Kind.ACCEPTED, "seal", "undo"))
    lines = list(proof.data["findings"])
    for subject in PROVED:
        assert any(subject in line for line in lines), f"nothing is said of {subject}:\n" + "\n".join(lines)
    report = operator.run("report", timeout=120).ended(0).out
    for line in lines:
        assert line.replace("|", "\\|") in report, line
    assert re.search(r"lb1.*gpu1 serves again \(UP", report), report
