"""Two lab hosts sum and train together: what a plan asks for with `verify.peer`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from changes import NEW_DRIVER, Operator, began, loaded_driver, owner_marker, under_load
from playing import Player
from steps import Change

from gpuchange.lab import Lab, state
from gpuchange.providers.contract import HostView
from gpuchange.providers.preflight.peer import PROVIDER as PREFLIGHT
from gpuchange.providers.verify.peer import PROVIDER as TOGETHER
from gpuchange.reports import Verdict
from gpuchange.states import Kind

STANDIN = Path(__file__).parents[1] / "standin"
PLACE = "/opt/pytorch"
PEER: dict[str, Any] = {"hosts": "gpu2", "python": "/usr/bin/python3", "env": {"PYTHONPATH": PLACE}, "timeout": "1m"}


def asked(player: Player) -> Verdict:
    """Preflight's question, played and judged."""
    peer = TOGETHER.params.model_validate(PEER).model_dump(mode="json", by_alias=True, exclude_none=True)
    view = HostView(player.name, {"verify": {"peer": peer}}, {})
    body = player.play(PREFLIGHT.role, "apply", PREFLIGHT.args(view, "apply"))
    return PREFLIGHT.judge(view, PREFLIGHT.report.model_validate(body))


def test_without_pytorch_with_it_and_without_the_peer(lab: Lab, player: Player) -> None:
    """PyTorch's surface is a stand-in here; plays, units, addresses and the network between the hosts are real."""
    verdict, change = asked(player), Change(lab)
    assert verdict.outcome == "reject"
    for name in ("gpu1", "gpu2"):
        assert f"{name} has no PyTorch for verify.peer: ModuleNotFoundError: No module named 'torch'" in verdict.why
        shutil.copytree(STANDIN, lab.host(name).root / PLACE.lstrip("/"), dirs_exist_ok=True)
    seen = tuple(f"verify.peer: PyTorch 0.0+standin on {name} sees 0 card(s)" for name in ("gpu2", "gpu1"))
    assert asked(player) == Verdict.accept(findings=seen)
    outcome = change.settle("verify/peer", "apply", "gpu1", **PEER)
    assert outcome.kind is Kind.ACCEPTED, outcome
    assert "rank 0 on gpu2" in outcome.data["findings"][0] and "rank 1 on gpu1" in outcome.data["findings"][0]
    assert not owner_marker(lab.host("gpu2")), "the peer was taken"
    nobody = change.play("verify/peer", "apply", "gpu1", **{**PEER, "hosts": "nobody"})
    assert "no host of the inventory matches verify.peer.hosts: nobody" in nobody.data["why"]
    lab.host("gpu2").unplug()
    try:
        lost = change.play("verify/peer", "apply", "gpu1", **PEER)
    finally:
        lab.host("gpu2").plug()
    assert lost.kind is Kind.LOST and "gpu2 unreachable: " in lost.data["why"], lost


def real_pytorch() -> Path:
    """PyTorch for a lab host's Python, unpacked once below the lab's directory, from wherever pip is told to look.

    GPUCHANGE_TEST_PYTORCH says which (torch==VERSION): the build for processors is a quarter of the other one's size.
    """
    folder = state.root() / "cache" / "pytorch"
    if not folder.is_dir():
        draft = folder.with_name("pytorch.partial")
        shutil.rmtree(draft, ignore_errors=True)
        version = os.environ.get("GPUCHANGE_TEST_PYTORCH", "torch")
        wanted = ["--only-binary=:all:", "--python-version", "3.11", "--target", str(draft), version]
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", *wanted], check=True, timeout=3000)
        draft.rename(folder)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(4500)
def test_a_changed_host_trains_with_one_in_service_by_the_real_pytorch(fresh_hosts: Lab, tmp_path: Path) -> None:
    """The whole way: a plan asks for it, gpu1 gets its driver, sums and trains with gpu2, and only then serves."""
    operator, lab = Operator(fresh_hosts, tmp_path), fresh_hosts
    for name in ("gpu1", "gpu2"):
        shutil.copytree(real_pytorch(), lab.host(name).root / PLACE.lstrip("/"))
    plan = operator.plan(hosts=["gpu1"], rollout={"canary": 0}, verify={"peer": {**PEER, "timeout": "5m"}})
    with under_load(lab) as watched:
        said = operator.run("apply", plan, "--yes", timeout=1500).ended(0)
    watched.nothing_failed()
    tested = [e for e in operator.events() if e.provider == "peer" and e.kind is Kind.ACCEPTED and e.phase == "verify"]
    released = [e for e in operator.events() if began(Kind.STARTED, "release", "gpu1")(e)]
    (line,) = tested[0].data["findings"]
    assert "all-reduce and DDP step are right: rank 0 on gpu2 (PyTorch 2" in line and " by gloo" in line, said.text
    assert tested[0].seq < released[0].seq
    assert loaded_driver(lab.host("gpu1")) == NEW_DRIVER
    assert not any(owner_marker(lab.host(name)) for name in ("gpu1", "gpu2"))
