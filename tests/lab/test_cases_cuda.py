"""Known cases of CUDA, cuDNN, MIG and lost cards, each staged on a real lab host and met by the phases that must."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from playing import Player
from stepping import Operator

from gpuchange.checks.snapshot import parse
from gpuchange.lab import Host, Lab
from gpuchange.lab.gpu import CARDS_FILE
from gpuchange.reports import Verdict

SMI = "nvidia-smi"
FIRST, SECOND = "0000:1b:00.0", "0000:43:00.0"
_turn = count()


class Case:
    """One host as first laid out, and the steps played on it."""

    def __init__(self, lab: Lab, host: Host, change: str) -> None:
        self.host, self.operator = host, Operator(Player(lab, host.name, change))

    def sh(self, script: str, check: bool = True) -> str:
        return self.host.run(["sh", "-ec", script], check=check)

    def file(self, path: str, text: str, mode: int = 0o644) -> None:
        place = self.host.root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
        place.chmod(mode)

    def library(self, path: str, soname: str) -> None:
        """A shared library that ldconfig takes for one: compiled with this soname."""
        place = self.host.root / path.lstrip("/")
        command = ["gcc", "-shared", "-fPIC", "-x", "c", "/dev/null", f"-Wl,-soname,{soname}", "-o", str(place)]
        subprocess.run(command, check=True)

    def cards(self) -> list[dict[str, Any]]:
        return list(json.loads((self.host.root / CARDS_FILE).read_text())["cards"])

    def card(self, index: int, **values: Any) -> None:
        """What becomes of a card while the host runs."""
        found = json.loads((self.host.root / CARDS_FILE).read_text())
        found["cards"][index].update(values)
        (self.host.root / CARDS_FILE).write_text(json.dumps(found))
        self.sh("/usr/lib/gpuchange-lab/simgpu refresh")

    def sealed(self) -> Verdict:
        """Recorded and sealed; the record's verdict."""
        recorded = self.accepted("record/host")
        self.accepted("seal/host")
        return recorded

    def accepted(self, step: str, mode: str = "apply") -> Verdict:
        _, verdict = self.operator.step(step, mode, **({"settle": "0s"} if "record" not in step else {}))
        assert verdict.outcome == "accept", verdict
        return verdict

    def verify(self) -> Verdict:
        return self.operator.step("verify/host", settle="0s")[1]

    def prove(self) -> Verdict:
        return self.operator.step("seal/host", "undo", settle="0s")[1]

    def reboot(self) -> None:
        self.host.power("cycle")
        self.host.wait_ready()


@pytest.fixture
def case(lab: Lab, request: pytest.FixtureRequest) -> Iterator[Case]:
    """The next host of the lab; put back to its snapshot when its turn comes again."""
    turn = next(_turn)
    host = lab.gpu_hosts[turn % len(lab.gpu_hosts)]
    if turn >= len(lab.gpu_hosts):
        host.restore("start")
        host.wait_ready()
    yield Case(lab, host, f"cuda{turn}")


# ---------------------------------------------------------------------------------------------- CUDA and cuDNN


def said(verdict: Verdict) -> str:
    return "\n".join((verdict.why, *verdict.findings))


def nvcc(version: str) -> str:
    return f"#!/bin/sh\necho 'Cuda compilation tools, release {version[:3]}, V{version}'\n"


@pytest.mark.case("alternatives-chain-behind-usr-local-cuda")
def test_the_chain_behind_usr_local_cuda_is_recorded_hop_by_hop_and_proved(case: Case) -> None:
    case.file("/usr/local/cuda-11.1/version.txt", "CUDA Version 11.1.105\n")
    case.file("/usr/bin/nvcc", nvcc("9.1.85"), 0o755)
    case.sh("update-alternatives --install /usr/local/cuda cuda /usr/local/cuda-11.1 111")
    case.sh("update-alternatives --set cuda /usr/local/cuda-11.1")
    recorded = case.sealed()
    wanted = "active toolkit 11.1.105 (alternatives, manual); others: 12.4.1; /usr/bin/nvcc 9.1.85"
    assert wanted in recorded.findings, recorded.findings
    chosen = parse(case.operator.evidence["seal/host"]["facts"]).cuda
    assert chosen.link == ("/usr/local/cuda", "/etc/alternatives/cuda", "/usr/local/cuda-11.1")
    case.sh("update-alternatives --auto cuda")  # a transaction that flips the default
    verified = case.verify()
    assert verified.outcome == "reject" and "active CUDA toolkit should be 11.1.105, is 12.4.1" in said(verified)
    case.sh("ln -sfn /usr/local/cuda-11.1 /usr/local/cuda")  # put right behind the alternatives' back
    proof = case.prove()
    assert proof.outcome == "reject" and "link should be /usr/local/cuda -> /etc/alternatives/cuda" in proof.why, proof
    assert "mode should be manual, is auto" in proof.why
    case.sh("ln -sfn /etc/alternatives/cuda /usr/local/cuda; update-alternatives --set cuda /usr/local/cuda-11.1")
    assert case.prove().outcome == "accept"


@pytest.mark.case("cudnn-version-moved-header", "cudnn-several-copies-pick-one")
def test_cudnn_is_found_in_every_layout_and_all_copies_are_told(case: Case) -> None:
    case.sh("dpkg -r --force-depends libcudnn9-cuda-12 libcudnn9-headers-cuda-12 && ldconfig")
    lib = "/usr/lib/x86_64-linux-gnu"
    case.file("/usr/include/x86_64-linux-gnu/cudnn_v8.h", '#include "cudnn_version.h"\n')
    numbers = "#define CUDNN_MAJOR 8\n#define CUDNN_MINOR 9\n#define CUDNN_PATCHLEVEL 7\n"
    case.file("/usr/include/x86_64-linux-gnu/cudnn_version_v8.h", numbers)
    case.sh("ln -s x86_64-linux-gnu/cudnn_v8.h /usr/include/cudnn.h")
    case.library(f"{lib}/libcudnn.so.8.9.7", "libcudnn.so.8")
    case.sh("ldconfig")
    assert recorded(case) == "cuDNN 8.9.7 (library libcudnn.so.8.9.7; header cudnn_version_v8.h)"
    case.sh(f"rm {lib}/libcudnn.so.8* /usr/include/cudnn.h /usr/include/x86_64-linux-gnu/cudnn_*; ldconfig")
    assert recorded(case) == "cuDNN: none found"
    case.file("/usr/local/cuda-12.4/include/cudnn.h", numbers.replace("8", "7").replace("9", "6").replace("L 7", "L 5"))
    assert recorded(case) == "cuDNN 7.6.5 (header cudnn.h)"
    case.sh("rm /usr/local/cuda-12.4/include/cudnn.h")
    several_copies(case)


def recorded(case: Case) -> str:
    return next(line for line in case.accepted("record/host").findings if line.startswith("cuDNN"))


def several_copies(case: Case) -> None:
    """Two versions beside each other, the link is clear, and a wheel that is nobody's business but its owner's."""
    home = "/usr/local/cuda-12.4/lib64"
    wheel = "/srv/app/lib/python3.11/site-packages/nvidia_cudnn_cu12-9.1.0.70.dist-info"
    case.library(f"{home}/libcudnn.so.6.0.21", "libcudnn.so.6")
    case.library(f"{home}/libcudnn.so.5.1.10", "libcudnn.so.5")
    case.sh(f"ldconfig; ln -s libcudnn.so.6 {home}/libcudnn.so; mkdir -p {wheel}")
    found = case.sealed().findings
    assert "cuDNN 6.0.21 (library libcudnn.so.6.0.21); also 5.1.10; venv /srv/app has 9.1.0.70" in found, found
    assert case.verify().outcome == "accept"
    case.sh(f"rm -r {wheel} {home}/libcudnn.so.5.1.10")
    verified = said(case.verify())
    assert f"cuDNN 9.1.0.70 in {wheel} is gone: no package of the change brought it" in verified
    assert f"cuDNN 5.1.10 in {home}/libcudnn.so.5.1.10 is gone" in verified
    assert "cuDNN copies: 2 differ" in case.prove().why


@pytest.mark.case("smi-cuda-version-is-not-the-toolkit")
def test_the_newest_cuda_of_the_driver_is_no_toolkit(case: Case) -> None:
    """The driver carries 12.4; an older toolkit is as it should be, a newer one than it carries is not."""
    case.file("/usr/local/cuda-11.3/version.json", '{"cuda": {"name": "CUDA SDK", "version": "11.3.1"}}')
    case.sh("update-alternatives --install /usr/local/cuda cuda /usr/local/cuda-11.3 113")
    case.sh("update-alternatives --set cuda /usr/local/cuda-11.3")
    body, verdict = case.operator.step("preflight/host")
    assert verdict.outcome == "accept", verdict
    seen = parse(body["facts"])
    assert (seen.smi.cuda, seen.cuda.active) == ("12.4", "11.3.1")
    case.sealed()
    assert case.verify().outcome == "accept"
    case.file("/usr/local/cuda-13.0/version.json", '{"cuda": {"name": "CUDA SDK", "version": "13.0.0"}}')
    case.sh("update-alternatives --install /usr/local/cuda cuda /usr/local/cuda-13.0 130")
    case.sh("update-alternatives --set cuda /usr/local/cuda-13.0")
    _, verdict = case.operator.step("preflight/host")
    assert "toolkit 13.0.0 needs driver 580.65.06 or newer, not 550.54.15" in said(verdict), verdict
    verified = case.verify()
    assert verified.outcome == "reject" and "toolkit 13.0.0 needs driver 580.65.06 or newer" in verified.why, verified


# -------------------------------------------------------------------------------------------------------- MIG


def in_mig_mode(case: Case, instances: str) -> None:
    """Card 0 in MIG mode, with these instances; its only user is away."""
    case.sh("systemctl disable --now modelserver.service")
    case.sh(f"{SMI} -i 0 -mig 1 && {SMI} mig -i 0 -cgi {instances} -C")


@pytest.mark.case("mig-lines-break-gpu-count")
def test_mig_devices_are_listed_under_their_card_and_are_no_cards(case: Case) -> None:
    case.card(1, name="NVIDIA TITAN X (Pascal)")
    in_mig_mode(case, "3g.40gb,3g.40gb")
    assert len(case.sh(f"{SMI} -L").splitlines()) == 4
    found = case.sealed().findings
    seen = parse(case.operator.evidence["record/host"]["facts"])
    assert [(card.bus_id, card.geometry) for card in seen.cards] == [(FIRST, "2x3g.40gb"), (SECOND, "none")]
    assert seen.cards[1].name == "NVIDIA TITAN X (Pascal)"
    assert all(device.uuid.startswith("MIG-") and device.place for device in seen.cards[0].mig)
    assert any(line.startswith(f"GPU 0 ({FIRST})") and "MIG devices 2x3g.40gb" in line for line in found), found
    assert case.verify().outcome == "accept"


@pytest.mark.case("mig-instances-gone-after-reboot")
def test_mig_devices_that_a_reboot_took_hold_the_host_and_come_back_by_the_command_that_is_told(case: Case) -> None:
    in_mig_mode(case, ",".join(["1g.10gb"] * 7))
    case.sealed()
    case.reboot()
    assert f"{SECOND}" not in case.sh(f"{SMI} -L") and "MIG" not in case.sh(f"{SMI} -L")
    verdict = case.verify()
    assert verdict.outcome == "hold", verdict
    assert f"MIG geometry differs: had 7x1g.10gb on GPU 0 ({FIRST}), now none" in verdict.why
    command = verdict.why.partition("now none: ")[2].partition(";")[0]
    assert command.startswith("nvidia-smi mig -i 0 -cgi 1g.10gb:0,"), verdict.why
    assert "MIG devices=none" in case.prove().why
    case.sh(command)
    assert case.verify().outcome == "accept"
    assert case.prove().outcome == "accept"
    set_again(case)
    modes_and_limits(case)


def set_again(case: Case) -> None:
    """The plan may want it done: forward before the comparison, in a rollback before the proof; twice is once."""
    case.operator.plan["verify"] = {"card_settings": "restore"}
    case.sh(f"{SMI} mig -i 0 -dgi; {SMI} -i 1 -pl 450; {SMI} -i 1 -pm 0")
    uuid = case.cards()[1]["uuid"]
    proof = case.prove()
    assert proof.outcome == "accept", proof
    done = [line for line in proof.findings if line.startswith("set again: ")]
    assert done[:2] == [f"set again: {SMI} -i {uuid} -pm 1", f"set again: {SMI} -i {uuid} -pl 700"], done
    assert done[2].startswith(f"set again: {SMI} mig -i 0 -cgi 1g.10gb:0,1g.10gb:1,")
    verdict = case.verify()
    assert verdict.outcome == "accept" and not any("set again" in line for line in verdict.findings), verdict
    case.operator.plan["verify"] = {}


def modes_and_limits(case: Case) -> None:
    """What else an operator sets on a card and a change may lose: each is told, and none lets the host back."""
    case.sh(f"{SMI} -i 1 -pl 500; {SMI} -i 1 -pm 0; {SMI} -i 1 -e 0")
    verdict = case.verify()
    assert verdict.outcome == "hold", verdict
    assert f"power limit of GPU 1 ({SECOND}) should be 700.00 W, is 500.00 W" in verdict.why
    assert f"persistence mode of GPU 1 ({SECOND}) should be Enabled, is Disabled" in verdict.why
    waits = f"ECC mode of GPU 1 ({SECOND}) is Enabled, Disabled is pending: a reset or reboot makes it count"
    assert waits in verdict.why
    case.reboot()
    verdict = case.verify()
    assert f"ECC mode of GPU 1 ({SECOND}) should be Enabled, is Disabled" in verdict.why, verdict
    assert f"power limit of GPU 1 ({SECOND})" not in verdict.why, "it came back with the driver"


# ------------------------------------------------------------------------------------------------- lost cards


@pytest.mark.case("one-dead-card-hides-all-from-smi")
def test_a_dead_card_that_silences_all_is_named_and_the_others_are_asked_alone(case: Case) -> None:
    case.sealed()
    case.card(1, lost=True)
    shown = case.sh(f"{SMI} -q -x", check=False)
    assert "Unable to determine the device handle" in shown and "<gpu " not in shown
    dead = f"GPU at {SECOND} not responding; 1 other answers"
    body, verdict = case.operator.step("preflight/host")
    assert verdict.outcome == "reject" and dead in said(verdict), verdict
    assert [card.bus_id for card in parse(body["facts"]).cards] == [FIRST]
    assert dead in said(case.accepted("record/host"))
    verified = case.verify()
    assert verified.outcome == "reject" and dead in verified.why, verified
    assert "driver" not in verified.why, "the driver is not at fault"
    case.card(1, lost=False, needs_reset=True)  # listed, exit code 0, and yet it computes nothing
    assert SECOND.upper() in case.sh(f"{SMI} --query-gpu=pci.bus_id --format=csv,noheader")
    verified = case.verify()
    assert verified.outcome == "reject", verified
    assert f"GPU at {SECOND} not responding; 1 other answers (GPU requires reset)" in verified.why


@pytest.mark.case("gpu-short-after-reboot-node-returned")
def test_a_card_short_after_a_reboot_is_named_with_where_it_went(case: Case) -> None:
    case.sealed()
    uuid = case.cards()[1]["uuid"]
    case.card(1, uninitialised=True)
    case.reboot()
    assert len(case.sh(f"{SMI} --query-gpu=uuid --format=csv,noheader").split()) == 1
    on_bus = case.verify()
    assert on_bus.outcome == "reject"
    assert f"1 of 2 GPUs; missing {uuid} ({SECOND}), on the PCI bus but not initialised" in on_bus.why, on_bus
    found = json.loads((case.host.root / CARDS_FILE).read_text())
    found["cards"].pop()
    (case.host.root / CARDS_FILE).write_text(json.dumps(found))
    case.reboot()
    gone = case.verify()
    assert f"1 of 2 GPUs; missing {uuid} ({SECOND}), not on the PCI bus" in gone.why, gone
