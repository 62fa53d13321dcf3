"""The test between two hosts: both ranks' units on this machine, met for real over TCP; what each failure is called."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hostcode
import pytest
from ansible.module_utils import gpuchange_host as host
from ansible.module_utils import gpuchange_measuring as measuring
from ansible.module_utils import gpuchange_rank as rank
from ansible.module_utils import gpuchange_unit as unit

from gpuchange import plan
from gpuchange.providers.contract import HostView
from gpuchange.providers.preflight.peer import PROVIDER as PREFLIGHT
from gpuchange.providers.verify.peer import PROVIDER, PeerReport
from gpuchange.reports import Verdict

STEP = {"phase": "verify", "provider": "peer", "direction": "do"}
STANDIN = Path(__file__).parent / "standin"


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for module in (host, unit):
        monkeypatch.setattr(module, "ROOT", str(tmp_path / "gpuchange"))
    monkeypatch.setattr(unit, "_has_systemd", lambda: False)
    return tmp_path


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


class Pair:
    """gpu1 is changed, gpu2 its peer; `play` is what the role does. `staged`: what is wrong with either rank."""

    def __init__(self, port: int, *staged: str, **params: Any) -> None:
        given = {"hosts": "gpu2", "address": "127.0.0.1", "port": port, "timeout": 20, "python": sys.executable}
        model = PROVIDER.params.model_validate({**given, **params})
        self.params = model.model_dump(mode="json", by_alias=True, exclude_none=True)
        self.staged, self.retries, self.waited = staged or ("", ""), 0, 0.0

    def view(self) -> HostView:
        return HostView(
            "gpu1", {"verify": {"peer": self.params}}, self.params, waited=self.waited, retries=self.retries
        )

    def call(self, number: int, mode: str, **more: Any) -> dict[str, Any]:
        env = {"PYTHONPATH": str(STANDIN), "STANDIN_TORCH": self.staged[number]} if self.staged[0] != "real" else {}
        args = {**PROVIDER.args(self.view(), "apply"), "env": env, "wait_s": 0.5 * (1 + number)}
        args |= {"rank": number, "name": f"gpu{2 - number}", **more}
        report = hostcode.call("gpuchange_peer", mode=mode, owner=hostcode.OWNER, args=args, step=STEP)
        return dict(report["report"])

    def listen(self) -> dict[str, Any]:
        return self.call(0, "apply", second=self.call(1, "probe"))

    def play(self) -> dict[str, Any]:
        first = self.listen()
        return self.call(1, "apply", first=first)

    def judged(self) -> Verdict:
        return PROVIDER.judge(self.view(), PeerReport.model_validate(self.play()))

    def ended(self) -> Verdict:
        verdict = self.judged()
        while verdict.outcome == "again":
            self.waited += 1.0
            verdict = self.judged()
        return verdict


def test_both_ranks_meet_and_are_right(port: int) -> None:
    pair = Pair(port)
    verdict = pair.ended()
    assert verdict.outcome == "accept", verdict
    (line,) = verdict.findings
    assert (
        line.startswith("test with peer gpu2: all-reduce and DDP step are right: rank 0 on gpu2")
        and "rank 1 on gpu1" in line
    )
    assert "by gloo, without cards: PyTorch sees none on gpu1 and gpu2" in line
    assert pair.call(1, "probe")["state"] == pair.call(0, "probe")["state"] == "done"


@pytest.mark.parametrize(
    ("staged", "says"),
    [
        (("", "wrong-sum"), "rank 1 on gpu1: all-reduce: 4 instead of 3"),
        (("wrong-sum", ""), "rank 0 on gpu2: all-reduce: 4 instead of 3"),
        (("", "wrong-step"), "rank 1 on gpu1: DDP step: -1.75 instead of -2"),
        (("", "broken"), "rank 1 on gpu1: PyTorch cannot be used: libcudart.so.13: cannot open"),
    ],
)
def test_what_is_wrong_names_rank_and_host(port: int, staged: tuple[str, str], says: str) -> None:
    verdict = Pair(port, *staged).ended()
    assert verdict.outcome == "reject" and says in verdict.why, verdict


@pytest.mark.parametrize(
    ("python", "says"), [("", "PyTorch cannot be used: libcudart"), ("/no/python", "ended with 127")]
)
def test_a_peer_that_cannot_test_holds_the_host_and_starts_nothing_on_it(port: int, python: str, says: str) -> None:
    pair = Pair(port, "broken", "", **({"python": python} if python else {}))
    pair.listen()
    unit.wait_for_unit(unit_of(0), 20)
    verdict = pair.ended()
    assert verdict.outcome == "hold" and "test with peer gpu2: rank 0 on gpu2: " in verdict.why and says in verdict.why
    assert "gpu1" not in verdict.why and pair.call(1, "probe")["begun"] is False


def unit_of(number: int, generation: int = 0) -> unit.UnitName:
    found = [name for name in unit.named("c1", f"rank{number}_") if ("-g" in name.stem) == bool(generation)]
    return found[-1]


@pytest.fixture
def occupied(port: int) -> Iterator[socket.socket]:
    with socket.create_server(("", port)) as taken:
        yield taken


def test_a_port_that_is_taken_is_waited_for_then_a_human_is_asked(port: int, occupied: socket.socket) -> None:
    pair = Pair(port)
    verdict = pair.judged()
    assert verdict.outcome == "again" and verdict.why == f"test with peer gpu2: port {port} is in use on gpu2"
    pair.waited = 20
    verdict = pair.judged()
    assert verdict.outcome == "hold" and f"port {port} is in use on gpu2, and was so for 20 s" in verdict.why
    occupied.close()
    pair.waited = 0
    assert pair.ended().outcome == "accept"


def test_a_hang_ends_in_time_and_says_where(port: int) -> None:
    began = time.monotonic()
    verdict = Pair(port, "", "hang", timeout=5).ended()
    assert verdict.outcome == "reject", verdict
    assert "rank 1 on gpu1: no end within 5 s while summing by all-reduce" in verdict.why
    assert time.monotonic() - began < 60


def test_a_peer_that_nobody_reaches_is_named_with_address_and_port(port: int) -> None:
    """Rank 0 listens; rank 1 is led elsewhere, as by a wrong address or a firewall."""
    pair = Pair(port, timeout=5)
    first = pair.listen()
    pair.params["address"] = "127.0.0.2" if first else ""
    with socket.create_server(("127.0.0.3", 0)) as elsewhere:
        pair.params["port"] = elsewhere.getsockname()[1]
        report = pair.call(1, "apply", first=first, wait_s=20)
    verdict = PROVIDER.judge(pair.view(), PeerReport.model_validate(report))
    assert verdict.outcome == "reject"
    assert f"rank 1 on gpu1: no end within 5 s while connecting to 127.0.0.2 port {pair.params['port']}" in verdict.why


def test_half_a_test_of_an_earlier_controller_does_not_count(port: int) -> None:
    """Killed between the two starts: rank 0 has waited in vain, or still waits with little time left."""
    pair = Pair(port, timeout=5)
    pair.listen()
    assert unit.wait_for_unit(unit_of(0), 20)["state"] == "finished"
    assert pair.ended().outcome == "accept"


def test_a_retry_tests_anew_beside_what_is_left(port: int) -> None:
    pair = Pair(port)
    pair.listen()  # still waits, and has the port
    pair.retries = 1
    assert "in use" in pair.judged().why
    Path(unit_of(0).file("stop")).touch()
    assert pair.ended().outcome == "accept"


def test_going_back_ends_the_rank_on_the_host(port: int) -> None:
    pair = Pair(port, "", "hang", timeout=300)
    assert pair.judged().outcome == "again"
    module = type("Module", (), {"params": {"owner": hostcode.OWNER}})()
    assert measuring.end_measuring(module) == ""
    assert "it was told to end while summing" in pair.call(1, "probe")["why"]


def test_preflight_asks_both_for_pytorch(port: int) -> None:
    pair = Pair(port, "", "broken")
    assert PREFLIGHT.args(pair.view(), "apply")["look"]
    reports = [pair.call(number, "probe", look=True) for number in (0, 1)]
    assert reports[0]["result"] == {"torch": "0.0+standin", "cards": 0, "ok": True, "why": ""}
    verdict = PREFLIGHT.judge(pair.view(), PeerReport.model_validate({**reports[1], "first": reports[0]}))
    assert verdict.outcome == "reject" and "gpu1 has no PyTorch for verify.peer: " in verdict.why, verdict
    well = PREFLIGHT.judge(pair.view(), PeerReport.model_validate({**reports[0], "host": "gpu1", "first": reports[0]}))
    assert well.findings[0] == "verify.peer: PyTorch 0.0+standin on gpu2 sees 0 card(s)"
    absent = pair.call(1, "probe", look=True, python="/no/python", env={})
    assert absent["result"]["why"] == "/no/python: not installed"
    assert not unit.named("c1"), "a look started something"


def test_a_plan_with_a_peer_has_its_preflight_and_a_step_more() -> None:
    head = "version: 1\nname: n\nreason: r\nhosts: gpu_hosts\n"
    chosen = plan.loads(head + "verify: {peer: gpu9}\n", "plan.yaml")
    assert chosen.chosen("preflight")[-1].provider is PREFLIGHT
    peer = chosen.chosen("verify")[-1]
    assert peer.provider is PROVIDER and PROVIDER.delegates(peer.params) == ("gpu9",)
    longer = plan.loads(head + "verify: {peer: {hosts: [gpu9, spare], port: 4000, backend: nccl}}\n", "plan.yaml")
    assert longer.chosen("verify")[-1].params["hosts"] == ["gpu9", "spare"]
    assert not any(
        row.provider in (PROVIDER, PREFLIGHT)
        for name in ("preflight", "verify")
        for row in plan.loads(head, "p").chosen(name)
    )


def test_what_a_peer_that_is_out_of_reach_is_called() -> None:
    """The engine waits for a delegate that cannot be reached, then holds, and names it: no word of the judge's."""
    from gpuchange.judging import Situation, judge
    from gpuchange.reports import Unreachable

    said = judge(
        Situation(PROVIDER, Pair(1).view(), "apply", lost_waited=600), Unreachable("gpu1", "timed out", "gpu2")
    )
    assert said.kind.value == "held" and said.data["why"] == "gpu2 unreachable: timed out"


def test_a_host_alone_can_only_speak_with_itself() -> None:
    done = {"state": "done", "host": "gpu1", "result": {"torch": "2", "cards": 1, "backend": "nccl", "ok": True}}
    verdict = PROVIDER.judge(Pair(1).view(), PeerReport.model_validate({**done, "first": done}))
    assert verdict.outcome == "accept" and "it spoke with itself" in verdict.findings[0]


def test_the_interface_is_the_one_of_the_address() -> None:
    assert rank.interface_of("127.0.0.1") == "lo" and rank.interface_of("192.0.2.1") == ""
    assert rank.local_address(1, "127.0.0.1", 9) == "127.0.0.1" and rank.ipv6_interface("::1") in ("lo", "")


def test_two_ranks_of_the_real_pytorch(port: int) -> None:
    python = os.environ.get("GPUCHANGE_TEST_TORCH") or sys.executable
    if subprocess.run([python, "-c", "import torch"], capture_output=True, check=False).returncode:
        pytest.skip("no PyTorch here; GPUCHANGE_TEST_TORCH may name a Python that has it")
    verdict = Pair(port, "real", "real", python=python, timeout=120).ended()
    assert verdict.outcome == "accept" and " by gloo" in verdict.findings[0], verdict
