"""The simulated GPU stack on real hosts: packages, modules and faults behave as the real ones do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gpuchange.checks.benchmark import compare, failed
from gpuchange.checks.gpu_function import judge_function
from gpuchange.lab import Host, Lab
from gpuchange.lab.gpu import CARDS_FILE
from gpuchange.lab.gpu.packages import NEW, START

UTILS = Path(__file__).parent.parent.parent / "playbooks/module_utils"
TESTER = "/root/tester"


@pytest.fixture
def host(fresh_hosts: Lab) -> Host:
    """A fresh host without GPU users, with the product's tester laid where Ansible would unpack it."""
    made = fresh_hosts.host("gpu1")
    package = made.root / TESTER.lstrip("/") / "ansible/module_utils"
    package.mkdir(parents=True)
    for name in ("bench", "cuda", "cuda_driver", "child", "look"):
        shutil.copy(UTILS / f"gpuchange_{name}.py", package)
    made.run(["systemctl", "disable", "--now", "modelserver.service"])
    made.run(["apt-get", "-q", "update"])
    return made


def measured(host: Host, what: str, deadline_s: float = 35) -> dict[str, Any]:
    call = f"{what}_test({deadline_s})"
    place = {"function": "cuda", "bench": "bench"}[what]
    imports = f"import json; from ansible.module_utils.gpuchange_{place} import *"
    script = f"{imports}; print(json.dumps({call}))"
    return dict(json.loads(host.run(["env", f"PYTHONPATH={TESTER}", "python3", "-B", "-c", script])))


def uuids(host: Host) -> list[str]:
    return [card["uuid"] for card in json.loads((host.root / CARDS_FILE).read_text())["cards"]]


def apt(host: Host, *packages: str, timeout: float = 120) -> None:
    options = ["-q", "-y", "--allow-downgrades", "--no-install-recommends"]
    host.run(["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", *options, "install", *packages], timeout=timeout)


def reboot(host: Host) -> None:
    host.power("cycle")
    host.wait_ready()


def loaded(host: Host) -> str:
    text = host.run(["cat", "/proc/driver/nvidia/version"], check=False)
    return text.split("Kernel Module")[1].split()[0] if "Kernel Module" in text else ""


def ledger(host: Host) -> list[str]:
    return (host.root / "var/log/gpuchange-lab/packages.log").read_text().splitlines()


def test_a_new_driver_counts_from_the_next_boot(host: Host) -> None:
    assert judge_function(measured(host, "function"), uuids(host)).outcome == "accept"
    apt(host, *NEW)
    assert loaded(host) == "550.54.15"
    smi = host.run(["nvidia-smi"], check=False)
    assert "Driver/library version mismatch" in smi and "570.172" in smi
    assert measured(host, "function")["error"]["code"] == 803
    reboot(host)
    assert loaded(host) == "570.172.08"
    assert host.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]).split() == ["570.172.08"] * 2
    assert judge_function(measured(host, "function"), uuids(host)).outcome == "accept"
    assert host.run(["readlink", "-f", "/usr/local/cuda"]).strip() == "/usr/local/cuda-12.8"
    boots = (host.root / "var/log/gpuchange-lab/boots.log").read_text().splitlines()
    assert len({line.split()[1] for line in boots}) == len(boots) == 2


def test_going_back_leaves_the_same_files(host: Host) -> None:
    list_files = (
        "cd / && find usr lib/modules etc/alternatives etc/modprobe.d etc/ld.so.cache var/lib/dkms -xdev "
        r"\( -type f -exec sha256sum {} + -o -type l -printf '%p -> %l\n' \) | sort"
    )
    before = host.run(["sh", "-c", list_files])
    apt(host, *NEW)
    assert host.run(["sh", "-c", list_files]) != before
    apt(host, *START, *(f"{name.partition('=')[0]}-" for name in NEW if "12-8" in name))
    assert host.run(["sh", "-c", list_files]) == before


def test_the_ledger_names_every_transaction_once(host: Host) -> None:
    known = len(ledger(host))
    apt(host, *NEW)
    configured = [line.split()[1:3] for line in ledger(host)[known:] if "postinst configure" in line]
    assert sorted("=".join(pair) for pair in configured) == sorted(NEW)
    known = len(ledger(host))
    apt(host, *NEW)  # nothing to do
    assert len(ledger(host)) == known


def test_a_module_in_use_stays(host: Host) -> None:
    host.run(["systemd-run", "--quiet", "--unit=job", "sh", "-c", "exec sleep 600 < /dev/nvidia0"])
    assert "in use" in host.run(
        ["sh", "-c", "rmmod nvidia_drm nvidia_modeset nvidia_uvm; rmmod nvidia 2>&1"], check=False
    )
    assert "sleep" in host.run(["nvidia-smi", "--query-compute-apps=pid,process_name", "--format=csv"])
    host.run(["systemctl", "stop", "job.service"])
    host.run(["rmmod", "nvidia"])
    assert host.run(["lsmod"]).split()[-2:] == ["Used", "by"]
    host.run(["modprobe", "nvidia_drm"])
    assert loaded(host) == "550.54.15"


def test_driver_build_fails(host: Host) -> None:
    host.break_("driver-build-fails")
    apt(host, *NEW)  # and apt is content
    assert "installed" not in host.run(["dkms", "status"])
    assert "Error 1" in host.run(["sh", "-c", "cat /var/lib/dkms/nvidia/570.172.08/build/make.log"])
    reboot(host)
    assert loaded(host) == ""
    assert measured(host, "function")["error"]["name"] == "CUDA_ERROR_NO_DEVICE"
    apt(host, *START)  # the old driver still builds
    reboot(host)
    assert loaded(host) == "550.54.15"
    host.mend("driver-build-fails")
    apt(host, *NEW)
    assert "nvidia/570.172.08" in host.run(["dkms", "status"])


def test_card_lost_at_reboot(host: Host) -> None:
    expected = uuids(host)
    host.break_("card-lost-at-reboot")
    assert judge_function(measured(host, "function"), expected).outcome == "accept"
    reboot(host)
    verdict = judge_function(measured(host, "function"), expected)
    assert verdict.outcome == "reject" and expected[-1] in verdict.why
    assert "Unable to determine the device handle for GPU" in host.run(["nvidia-smi"], check=False)
    assert "(rev ff)" in host.run(["lspci"])
    host.mend("card-lost-at-reboot")
    assert judge_function(measured(host, "function"), expected).outcome == "accept"


def test_a_bad_new_driver_is_good_again_when_rolled_back(host: Host) -> None:
    before = measured(host, "bench")
    for fault in ("wrong-values", "slow-card", "ecc-errors", "overheat"):
        host.break_(fault)
    assert sound(host, before) == {"function": True, "speed": True}
    assert health(host) == [["31", "0"]] * 2
    apt(host, *NEW)
    reboot(host)
    assert sound(host, before) == {"function": False, "speed": False}
    assert all(int(hot) > 90 and int(errors) > 0 for hot, errors in health(host))
    host.mend("slow-card")
    assert sound(host, before) == {"function": False, "speed": True}
    apt(host, *START)
    reboot(host)
    assert sound(host, before) == {"function": True, "speed": True}
    assert health(host) == [["31", "0"]] * 2


def health(host: Host) -> list[list[str]]:
    fields = "temperature.gpu,ecc.errors.uncorrected.volatile.total"
    return [
        line.split(", ")
        for line in host.run(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]).splitlines()
    ]


def sound(host: Host, before: dict[str, Any]) -> dict[str, bool]:
    return {
        "function": judge_function(measured(host, "function"), uuids(host)).outcome == "accept",
        "speed": not failed(compare(before, measured(host, "bench"), 10.0)),
    }


def test_a_driver_that_never_answers(host: Host) -> None:
    host.break_("driver-hangs")
    apt(host, *(name for name in NEW if "570" in name))
    host.run(["modprobe", "-r", "nvidia_drm", "nvidia_uvm"])
    host.run(["sh", "-c", "rmmod nvidia; modprobe -a nvidia_drm nvidia_uvm"])
    assert loaded(host) == "570.172.08"
    result = measured(host, "function", 3)
    assert result["timed_out"] and "cuInit" in result["why"]
    assert host.run(["timeout", "-s", "KILL", "2", "nvidia-smi"], check=False) == ""
    host.mend("driver-hangs")
    assert judge_function(measured(host, "function"), uuids(host)).outcome == "accept"


def test_apt_hangs_until_mended(host: Host) -> None:
    host.break_("apt-hangs")
    new = [name for name in NEW if "cudnn" in name]
    host.run(["systemd-run", "--quiet", "--unit=install", "apt-get", "-q", "-y", "install", *new])
    waiting = [
        "sh",
        "-c",
        "until pgrep -f 'post[i]nst' >/dev/null; do sleep 0.1; done; systemctl is-active install.service",
    ]
    assert host.run(waiting).strip() == "active"
    host.mend("apt-hangs")
    host.run(["sh", "-c", "while systemctl is-active -q install.service; do sleep 0.1; done"])
    assert "9.8.0.87" in host.run(["dpkg-query", "-W", "libcudnn9-cuda-12"])


def test_repo_old_gone(host: Host) -> None:
    host.break_("repo-old-gone")
    listed = host.run(["apt-cache", "madison", "libcudnn9-cuda-12"])
    assert "9.8.0.87" in listed and "9.1.0.70" not in listed
    host.mend("repo-old-gone")
    assert "9.1.0.70" in host.run(["apt-cache", "madison", "libcudnn9-cuda-12"])


def test_held_and_interrupted_packages(host: Host) -> None:
    host.break_("held-package")
    assert host.run(["apt-mark", "showhold"]).strip() == "nvidia-driver-550"
    host.mend("held-package")
    assert host.run(["apt-mark", "showhold"]) == ""
    host.break_("dpkg-interrupted")
    assert "nvidia-container-toolkit-base" in host.run(["dpkg", "--audit"])
    host.mend("dpkg-interrupted")
    assert host.run(["dpkg", "--audit"]) == ""


def test_swapped_cards_show_after_power_off(host: Host) -> None:
    path = host.root / CARDS_FILE
    described = json.loads(path.read_text())
    described["cards"][1]["uuid"] = "GPU-00000000-0000-4000-8000-000000000001"
    path.write_text(json.dumps(described))
    assert "GPU-00000000-0000-4000" not in host.run(["nvidia-smi", "-L"])
    reboot(host)
    assert "GPU-00000000-0000-4000" in host.run(["nvidia-smi", "-L"])
