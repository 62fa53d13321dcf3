"""One set of packages or several builds; containers and fabric manager beside a host that answers. Pure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpuchange.checks import containers, driver, fabric, package_set, snapshot
from gpuchange.checks.readiness import Wish, objections
from gpuchange.providers.contract import HostView
from gpuchange.providers.stack import apt as stack_apt
from gpuchange.providers.stack.apt import AptStackReport

TWO_H100: dict[str, Any] = json.loads((Path(__file__).parent / "cases/facts/two_h100.json").read_text())
UBUNTU, CUDA = "530.41.03-0ubuntu0.22.04.2", "530.30.02-0ubuntu1"


@pytest.mark.case("same-branch-two-repos-suffix-conflict")
def test_a_set_of_two_builds_is_told_as_a_table() -> None:
    packages = {"nvidia-dkms-530": UBUNTU, "nvidia-kernel-common-530": CUDA, "nvidia-settings": "1.0", "bash": "5"}
    said = package_set.mixed(
        packages, {"nvidia-dkms-530": "archive jammy/restricted", "nvidia-kernel-common-530": "cuda"}
    )
    assert said == f"nvidia-kernel-common-530 {CUDA} from cuda; nvidia-dkms-530 {UBUNTU} from archive jammy/restricted"
    suffix = {"nvidia-dkms-530": "530.41.03-0ubuntu1", "nvidia-utils-530": UBUNTU}
    assert "from unknown" in package_set.mixed(suffix, {})


@pytest.mark.parametrize(
    "packages",
    [
        {},
        {
            "libcuda1": "535.309.01-0+deb12u1",
            "nvidia-smi": "535.309.01-0+deb12u1+b1",
            "nvidia-persistenced": "535.171.04-1",
        },
        {
            "nvidia-driver-570": "570.1.1-1",
            "libnvidia-compute-570:i386": "570.1.1-1",
            "nvidia-kernel-common": "20220217",
        },
        {
            "nvidia-driver-570": "570.1.1-1",
            "nvidia-container-toolkit": "1.17.8-1",
            "nvidia-settings": "565.57.01-0ubuntu1",
        },
    ],
)
def test_a_whole_set_is_no_mix(packages: dict[str, str]) -> None:
    assert package_set.mixed(packages, {}) == ""


def facts(**changes: Any) -> dict[str, Any]:
    return {**TWO_H100, **changes}


def told(**changes: Any) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for row in objections(facts(**changes), {}, snapshot.parse(facts(**changes)), Wish(dkms_set_aside=False)):
        found.setdefault(row.kind, []).append(row.says)
    return found


def test_unmet_dependencies_stand_against_a_change() -> None:
    packages = {**TWO_H100["packages"], "unmet": ["a : Depends: b (= 2) but 1 is installed"]}
    assert told(packages=packages)["broken_packages"] == ["unmet dependencies: a : Depends: b (= 2) but 1 is installed"]


def test_a_leftover_can_be_set_aside_if_the_plan_says_so() -> None:
    dkms = {"rc": 4, "out": "", "err": "Error!", "hung": False, "leftovers": ["nvidia/390.48"]}
    (said,) = told(dkms=dkms)["broken_dkms"]
    assert said.startswith("dkms database broken by leftover nvidia/390.48; to have it set aside, write stack:")
    picture = snapshot.parse(facts(dkms=dkms))
    kinds = {row.kind for row in objections(facts(dkms=dkms), {}, picture, Wish(dkms_set_aside=True))}
    assert "broken_dkms" not in kinds and "note" in kinds


SEEING = {"runtime": "docker", "id": "1", "name": "web", "rc": 0, "says": "GPU 0: NVIDIA H100"}
BLIND = {**SEEING, "rc": 255, "says": "Failed to initialize NVML: Unknown Error"}


@pytest.mark.case("daemon-reload-cuts-gpus-from-running-containers")
def test_a_container_that_lost_its_gpus_is_named_and_one_that_never_had_any_is_not() -> None:
    picture = snapshot.parse(facts())
    now = facts(containers={"running": [BLIND], "fresh": None})
    said = list(containers.losses(facts(containers={"running": [SEEING]}), now, picture))
    assert said == ["host OK, container web sees no GPU: Failed to initialize NVML: Unknown Error"]
    assert list(containers.losses(now, now, picture)) == []
    assert (
        list(containers.losses({}, facts(containers={"running": [SEEING], "fresh": {"rc": 0, "says": ""}}), picture))
        == []
    )
    fresh = facts(containers={"running": [], "fresh": {"runtime": "", "rc": None, "says": "no container runtime runs"}})
    assert "a fresh one says: no container runtime runs" in next(containers.losses({}, fresh, picture))
    assert told(containers={"running": [BLIND]})["note"] == ["host OK, container web sees no GPU: " + BLIND["says"]]


def test_going_back_where_there_was_no_driver_before_is_judged_as_installed() -> None:
    view = HostView("h1", {}, {}, direction="undo")
    report = AptStackReport(state="not_done", why="no module", driver={"loaded": ""}, left=0)
    assert stack_apt.judge_undo(view, report).outcome == "accept"
    assert stack_apt.judge_undo(view, report.model_copy(update={"left": 2})).outcome == "reject"
    assert stack_apt.judge_undo(view, AptStackReport(state="not_done", why="no store")).outcome == "reject"


SWITCH = {"address": "0000:05:00.0", "device": "0x22a3", "class": "0x068000"}


def test_a_fabric_manager_that_failed_matters_only_beside_nvswitches() -> None:
    failed = {"rc": 0, "out": "", "err": "", "active": "failed", "words": "NV_WARN_NOTHING_TO_DO"}
    plain = facts(fabric_manager=failed)
    assert fabric.troubles(plain, snapshot.parse(plain)) == []
    switched = facts(fabric_manager=failed, pci=[*TWO_H100["pci"], SWITCH])
    (said,) = fabric.troubles(switched, snapshot.parse(switched))
    assert said == "NVSwitch present, but nvidia-fabricmanager.service is failed: NV_WARN_NOTHING_TO_DO"
    running = {**switched, "fabric_manager": {**failed, "active": "active"}}
    assert fabric.troubles(running, snapshot.parse(running)) == []


def test_libraries_and_the_next_kernel_are_witnesses_of_their_own() -> None:
    loaded = {"proc_version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  460.56  x\n", "modules": {}}
    module = {"nvidia": {"version": "460.56", "file": "/lib/modules/6.1/nvidia.ko"}}
    copies = [{"path": "/usr/lib/libcuda.so.1", "real": "/usr/lib/libcuda.so.460.73.01"}]
    given = {
        "kernel": "6.1",
        "loaded": loaded,
        "on_disk": {"6.1": module, "6.2": {}},
        "boot": {"kernel": "6.2", "initramfs": {"file": "", "modules": {}}},
        "userspace": {
            "libcuda": {"copies": copies, "loader": ["libcuda.so.1 (libc6,x86-64) => /usr/lib/libcuda.so.1"]}
        },
    }
    found = driver.parse(given, None, "460.56")
    assert found.libraries == {"libcuda": "460.73.01"} and found.next_boot is None
    assert driver.inconsistencies(found) == (
        "module 460.56 loaded, none on disk for kernel 6.2, which boots next",
        "libcuda.so is 460.73.01, the installed packages are 460.56",
    )
    assert driver.parse(given, None, None).userspace == "460.73.01"  # a driver that came without packages
