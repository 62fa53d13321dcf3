"""The pure parts of the apt modules: choice of packages, simulation, holds, kernels; and the one reboot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hostcode
import pytest
from ansible.module_utils import gpuchange_apt_unit as unit_script
from ansible.module_utils import gpuchange_boot as boot
from ansible.module_utils import gpuchange_driver as driver
from ansible.module_utils import gpuchange_driver_walk as walking
from ansible.module_utils import gpuchange_host as host
from ansible.module_utils import gpuchange_stack as stack
from ansible.module_utils import gpuchange_unit as unit
from ansible.module_utils.gpuchange_apt_choice import Offer, choose, driver_numbers, matches, parse_show, upstream
from ansible.module_utils.gpuchange_apt_look import cuda_turn, toolkit_package
from ansible.module_utils.gpuchange_apt_private import parse_simulation, private_settings, strangers, unreadable
from ansible.module_utils.gpuchange_packages import parse_installed, parse_policy
from hostcode import OWNER

NEW_BOOT = "0b5b7d4e-93a7-4b6e-8d0b-2f3f0f6a1c11"


def package(name: str, version: str, *depends: str, offered: bool = True) -> str:
    lines = [f"Package: {name}", f"Version: {version}", "Architecture: amd64", "Installed-Size: 10"]
    lines += [f"Depends: {', '.join(depends)}"] if depends else []
    lines += ["Filename: pool/x.deb", "Size: 100", "SHA256: abc"] if offered else ["Status: install ok installed"]
    return "\n".join(lines) + "\n"


def driver_packages(version: str, build: str = "0ubuntu1", flavour: str = "", extra: tuple[str, ...] = ()) -> list[str]:
    branch, full = version.split(".")[0] + flavour, f"{version}-{build}"
    parts = [f"nvidia-utils-{branch}", f"libnvidia-compute-{branch}", f"nvidia-dkms-{branch}"]
    rows = [package(f"nvidia-driver-{branch}", full, *(f"{part} (= {full})" for part in parts), "libc6 (>= 2.34)")]
    return rows + [package(part, full) for part in (*parts, *(f"{name}-{branch}" for name in extra))]


def offer(*rows: str, candidates: dict[str, str] | None = None) -> Offer:
    return Offer(parse_show("\n".join(rows)), candidates or {})


def installed(version: str, flavour: str = "", *more: str) -> dict[str, str]:
    branch, full = version.split(".")[0] + flavour, f"{version}-0ubuntu1"
    names = ("nvidia-driver", "nvidia-utils", "libnvidia-compute", "nvidia-dkms", *more)
    return {f"{name}-{branch}": full for name in names}


def test_the_whole_branch_set_moves_in_one_choice() -> None:
    choice = choose({"driver": "570.172.08"}, offer(*driver_packages("570.172.08")), installed("550.54.15"))
    assert choice.problems == []
    assert set(choice.install.values()) == {"570.172.08-0ubuntu1"} and len(choice.install) == 4
    assert choice.remove == sorted(installed("550.54.15"))
    assert choice.renamed["nvidia-dkms-550"] == "nvidia-dkms-570"


def test_the_shape_of_the_host_is_carried_over() -> None:
    rows = driver_packages("570.172.08") + driver_packages("570.172.08", flavour="-server")
    choice = choose({"driver": "570.172.08"}, offer(*rows), installed("550.54.15", "-server"))
    assert choice.mains["driver"] == "nvidia-driver-570-server" and all("-server" in name for name in choice.install)


def test_within_a_branch_nothing_is_removed() -> None:
    choice = choose({"driver": "570.172.08"}, offer(*driver_packages("570.172.08")), installed("570.124.06"))
    assert choice.remove == [] and choice.install["nvidia-utils-570"] == "570.172.08-0ubuntu1"


def test_a_missing_version_names_what_is_offered() -> None:
    choice = choose({"driver": "570.999.99"}, offer(*driver_packages("570.172.08")), installed("550.54.15"))
    assert "nvidia-driver-570 570.999.99 is not offered" in choice.problems[0]
    assert "offered: 570.172.08-0ubuntu1" in choice.problems[0]


def test_two_builds_of_one_version_are_ambiguous_unless_apt_prefers_one() -> None:
    """Case: same-branch-two-repos-suffix-conflict."""
    rows = driver_packages("530.41.03", "0ubuntu1") + driver_packages("530.41.03", "0ubuntu0.22.04.2")
    choice = choose({"driver": "530.41.03"}, offer(*rows), installed("525.85.12"))
    assert "ambiguous: 530.41.03-0ubuntu0.22.04.2, 530.41.03-0ubuntu1" in choice.problems[0]
    preferred = offer(*rows, candidates={"nvidia-driver-530": "530.41.03-0ubuntu1"})
    assert set(choose({"driver": "530.41.03"}, preferred, {}).install.values()) == {"530.41.03-0ubuntu1"}
    exact = choose({"driver": "530.41.03-0ubuntu0.22.04.2"}, offer(*rows), installed("525.85.12"))
    assert set(exact.install.values()) == {"530.41.03-0ubuntu0.22.04.2"}


def test_a_mixed_set_is_refused_with_its_table() -> None:
    """Case: same-branch-two-repos-suffix-conflict."""
    mixed = {"nvidia-dkms-530": "530.41.03-0ubuntu0.22.04.2", "nvidia-kernel-common-530": "530.30.02-0ubuntu1"}
    choice = choose({"driver": "535.1.2"}, offer(), mixed)
    assert (
        "mix of versions" in choice.problems[0] and "nvidia-kernel-common-530 530.30.02-0ubuntu1" in choice.problems[0]
    )
    assert len(driver_numbers(mixed)) == 2


def test_a_missing_fabric_manager_is_a_problem_not_a_removal() -> None:
    """Case: fabricmanager-differs-in-patch-level."""
    rows = [*driver_packages("530.41.03"), package("nvidia-fabricmanager-530", "530.30.02-1")]
    choice = choose({"driver": "530.41.03"}, offer(*rows), installed("525.85.12", "", "nvidia-fabricmanager"))
    assert any("nvidia-fabricmanager-530 530.41.03 is not offered" in problem for problem in choice.problems)


def test_a_part_that_the_new_branch_dropped_goes_and_is_named() -> None:
    choice = choose(
        {"driver": "570.172.08"},
        offer(*driver_packages("570.172.08")),
        installed("550.54.15", "", "libnvidia-fbc1"),
    )
    assert "libnvidia-fbc1-550" in choice.remove and "no counterpart in branch 570" in choice.notes[0]


def test_cuda_parts_follow_the_release_even_downwards() -> None:
    rows = [
        package("cuda-toolkit-12-8", "12.8.0-1", "cuda-cudart-12-8 (>= 12.8.57)"),
        package("cuda-cudart-12-8", "12.8.57-1"),
        package("cuda-cudart-12-8", "12.8.90-1"),
    ]
    have = {"cuda-toolkit-12-8": "12.8.1-1", "cuda-cudart-12-8": "12.8.90-1", "cuda-toolkit-12-4": "12.4.1-1"}
    choice = choose({"cuda": "12.8.0"}, offer(*rows), have)
    assert choice.install == {"cuda-toolkit-12-8": "12.8.0-1", "cuda-cudart-12-8": "12.8.57-1"}
    assert choice.notes == ["cuda-toolkit-12-4 12.4.1-1 stays installed beside it"] and choice.remove == []


def test_cudnn_takes_its_cuda_from_plan_or_host() -> None:
    rows = [package(f"libcudnn9-{part}cuda-12", "9.8.0.87-1") for part in ("", "headers-", "dev-")]
    have = {"libcudnn9-cuda-12": "9.1.0.70-1", "libcudnn9-headers-cuda-12": "9.1.0.70-1"}
    choice = choose({"cudnn": "9.8.0"}, offer(*rows), have)
    assert sorted(choice.install) == ["libcudnn9-cuda-12", "libcudnn9-headers-cuda-12"]
    assert "which CUDA it is for" in choose({"cudnn": "9.8.0"}, offer(*rows), {}).problems[0]


def test_nccl_takes_the_build_for_the_cuda_release() -> None:
    rows = [package("libnccl2", f"2.26.2-1+cuda{release}") for release in ("12.4", "12.8")]
    rows += [package("cuda-toolkit-12-8", "12.8.1-1")]
    assert choose({"nccl": "2.26.2", "cuda": "12.8.1"}, offer(*rows), {}).install["libnccl2"] == "2.26.2-1+cuda12.8"
    assert "ambiguous" in choose({"nccl": "2.26.2"}, offer(*rows), {}).problems[0]


def test_what_only_dpkg_knows_is_not_offered() -> None:
    rows = [package("libnccl2", "2.26.2-1", offered=False)]
    assert "not offered" in choose({"nccl": "2.26.2"}, offer(*rows), {}).problems[0]


def test_a_foreign_architecture_is_a_package_of_its_own() -> None:
    rows = [*driver_packages("570.172.08"), *driver_packages("570.172.08")]
    foreign = package("libnvidia-compute-570", "570.172.08-0ubuntu1").replace("amd64", "i386")
    have = {**installed("550.54.15"), "libnvidia-compute-550:i386": "550.54.15-0ubuntu1"}
    choice = choose({"driver": "570.172.08"}, offer(*rows, foreign), have)
    assert choice.problems == [] and choice.renamed["libnvidia-compute-550:i386"] == "libnvidia-compute-570:i386"
    assert "libnvidia-compute-570:i386" in choice.install and "libnvidia-compute-550:i386" in choice.remove


def test_versions() -> None:
    assert upstream("1:570.172.08-0ubuntu1") == "570.172.08"
    assert matches("9.8.0", "9.8.0.87-1") and not matches("9.8", "9.80.0-1") and not matches("57", "570.1.1-1")


# ---------------------------------------------------------------------------------------- simulation


SIMULATION = """\
Reading package lists...
Remv nvidia-driver-550 [550.54.15-0ubuntu1]
Inst libcudnn9-cuda-12 [9.1.0.70-1] (9.8.0.87-1 NVIDIA CUDA:./, local-deb [amd64])
Inst nvidia-driver-570 (570.172.08-0ubuntu1 local-deb [amd64]) []
Inst libc6 [2.36-9] (2.36-10 Debian:12 [amd64])
Remv jupyter [1.0]
Conf nvidia-driver-570 (570.172.08-0ubuntu1 local-deb [amd64])
"""


def test_simulation_and_strangers() -> None:
    moves = parse_simulation(SIMULATION)
    assert {"name": "nvidia-driver-570", "from": "", "to": "570.172.08-0ubuntu1"} in moves
    choice = choose({}, offer(), {})
    choice.install = {"nvidia-driver-570": "570.172.08-0ubuntu1", "libcudnn9-cuda-12": "9.8.0.87-1"}
    choice.remove = ["nvidia-driver-550"]
    assert strangers(moves, choice) == ["jupyter 1.0 would be removed", "libc6 2.36-9 would become 2.36-10"]


def test_private_settings_drop_hooks_and_keep_the_proxy() -> None:
    dump = (
        'Acquire::http::Proxy "http://p:1";\nDir::Cache "var/cache/apt";\nDir::Etc::parts "apt.conf.d";\n'
        'APT::Update::Post-Invoke:: "touch /x";\nDPkg::Post-Invoke:: "rm -f /y";\nDir::State "var/lib/apt";\n'
    )
    text = private_settings(dump, [("Dir::Cache", "/run/c")])
    assert 'Acquire::http::Proxy "http://p:1";' in text and 'Dir::Cache "/run/c";' in text and "var/cache" not in text
    assert "Invoke" not in text and "Etc::parts" not in text and 'Dir::State "var/lib/apt";' in text
    assert "DPkg::Post-Invoke" in private_settings(dump, [], hooks=True)


def test_unreadable_sources_are_found_although_apt_ends_well() -> None:
    err = "W: Failed to fetch http://a/x  404\nW: Some index files failed to download.\nW: Target is configured twice\n"
    assert unreadable(err) == ["Failed to fetch http://a/x  404"]


def test_policy_and_dpkg_rows() -> None:
    text = (
        "bash:\n  Installed: 5.2-1\n  Candidate: 5.2-3\n  Version table:\n     5.2-3 500\n"
        "        500 http://d/debian bookworm/main amd64 Packages\n *** 5.2-1 100\n        100 /var/lib/dpkg/status\n"
    )
    entry = parse_policy(text)["bash"]
    assert (entry["installed"], entry["candidate"], entry["origin"]) == ("5.2-1", "5.2-3", "local")
    rows = parse_installed("a\tamd64\t1\tinstall\tinstalled\t\nb\ti386\t2\tinstall\thalf-configured\t\n", "amd64")
    assert rows["b:i386"]["status"] == "half-configured"
    assert parse_installed("a\tamd64\t1\tdeinstall\tconfig-files\t\n", "amd64") == {}


# --------------------------------------------------------------------------- holds, alternatives, driver


def test_a_hold_passes_to_the_successor_only_when_it_took_over() -> None:
    renamed = {"nvidia-driver-550": "nvidia-driver-570"}
    holds = ["nvidia-driver-550", "bash"]
    assert unit_script.wanted_holds(holds, renamed, {"nvidia-driver-570"}) == {"nvidia-driver-570", "bash"}
    assert unit_script.wanted_holds(holds, renamed, {"nvidia-driver-550"}) == set(holds)
    assert unit_script.wanted_holds(holds, renamed, set()) == set(holds)


def test_cuda_link_turns_only_where_it_follows_by_itself() -> None:
    mains = {"cuda": "cuda-toolkit-12-8"}
    auto = {"cuda": {"mode": "auto", "value": "/usr/local/cuda-12.4"}}
    by_hand = {"cuda": {"mode": "manual", "value": "/usr/local/cuda-11.1"}}
    assert cuda_turn(mains, auto, False) == "/usr/local/cuda-12.8"
    assert cuda_turn(mains, by_hand, False) == ""
    assert cuda_turn(mains, by_hand, True) == "/usr/local/cuda-12.8"
    assert cuda_turn({}, auto, False) == "" and toolkit_package("/usr/local/cuda-12.4") == "cuda-toolkit-12-4"


def test_modinfo_records() -> None:
    text = (
        "filename:       /lib/modules/6.1/updates/dkms/nvidia-current.ko.xz\nversion:        535.1\n"
        "supported:      external\n"
        "filename:       /lib/modules/6.1/updates/dkms/nvidia-current-uvm.ko\nversion:        535.1\n"
        "name: x\nfilename:       (builtin)\n"
    )
    found = driver.parse_modinfo(text)
    assert sorted(found) == ["nvidia", "nvidia_uvm"] and found["nvidia"]["version"] == "535.1"
    assert driver.module_name("/x/nvidia-drm.ko") == "nvidia_drm"


def test_debians_names_of_the_modules_are_asked_for(tmp_path: Path) -> None:
    """`modinfo nvidia` finds nothing where the file is nvidia-current.ko."""
    for name in ("updates/dkms/nvidia-current.ko", "updates/dkms/nvidia-current-uvm.ko.xz", "kernel/net/other.ko"):
        (tmp_path / "6.1" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "6.1" / name).touch()
    found = driver.module_names("6.1", str(tmp_path))
    assert found == [*driver.MODULES, "nvidia-current", "nvidia-current-uvm"]
    assert driver.module_names("6.2", str(tmp_path)) == list(driver.MODULES)


def test_driver_witnesses() -> None:
    """Case: mixed-module-set-nvidia-vs-modeset."""
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.172.08  Release Build  (x)\n"
    assert driver.parse_proc_version(text) == "570.172.08" and driver.is_open(text)
    assert driver.parse_proc_version("") == ""
    assert boot.compare_kernels("6.8.0-100-generic", "6.8.0-60-generic") > 0
    good = {name: {"version": "570.1.1", "file": f"/lib/{name}.ko"} for name in ("nvidia", "nvidia_uvm")}
    assert driver.disk_problem("570.1.1", "6.8", good) == ""
    assert "no nvidia module 570.1.1 exists for kernel 6.8" in driver.disk_problem("570.1.1", "6.8", {})
    odd = {**good, "nvidia_modeset": {"version": "390.87", "file": "/lib/m.ko"}}
    assert "nvidia_modeset is 390.87 (/lib/m.ko)" in driver.disk_problem("570.1.1", "6.8", odd)


# -------------------------------------------------------------------------------------- the one reboot


@pytest.fixture
def walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    for where in (host, unit):
        monkeypatch.setattr(where, "ROOT", str(tmp_path))
    monkeypatch.setattr(unit, "_has_systemd", lambda: False)
    hostcode.set_arguments(mode="apply", owner=OWNER, step={"phase": "stack", "provider": "apt", "direction": "do"})
    made = stack.Walk(host.open_module(), stack.Target({}, [], "570.172.08", {}), {"versions": {}})

    def end(state: str, why: str = "", **_more: Any) -> None:
        raise SystemExit(f"{state}: {why}")

    monkeypatch.setattr(made, "end", end)
    monkeypatch.setattr(walking, "loaded_version", lambda: "550.54.15")
    return made


def reboots(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    started: list[str] = []

    def record(_module: Any, step: str, argv: list[str], *_waits: float, **_options: Any) -> dict[str, Any]:
        started.append(step)
        return {"state": "running", "unit": f"gpuchange-c1-stack-do-{step}.service"}

    monkeypatch.setattr(walking, "host_unit", record)
    return started


@pytest.mark.case("reboot-module-true-before-reboot")
def test_reboot_is_asked_for_once_and_not_judged_on_the_old_boot(walk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case: reboot-module-true-before-reboot."""
    started = reboots(monkeypatch)
    for _ in range(2):
        with pytest.raises(SystemExit, match="running: host answered but has not rebooted yet"):
            walk.loaded()
    assert started == ["reboot", "reboot"]  # the same named unit: the second call attaches
    assert walk._boot_before() == host.boot_id()


@pytest.mark.case("reboot-module-true-before-reboot")
def test_a_second_reboot_is_never_tried(walk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case: reboot-does-not-cure-mismatch."""
    started = reboots(monkeypatch)
    host.save_once(walk._boot_file(), {"boot_id": "11111111-1111-1111-1111-111111111111"})
    monkeypatch.setattr(walk, "_comes", lambda _wanted, _patience: False)
    with pytest.raises(SystemExit, match=r"not_done: rebooted once, but the loaded driver is 550\.54\.15"):
        walk.loaded()
    assert started == []


def test_a_missing_module_after_the_reboot_is_named(walk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case: reboot-does-not-cure-mismatch."""
    host.save_once(walk._boot_file(), {"boot_id": "11111111-1111-1111-1111-111111111111"})
    monkeypatch.setattr(walking, "boot_kernel", lambda: "6.8.0-60")
    monkeypatch.setattr(driver, "modules_on_disk", lambda _kernel: {})
    said = r"rebooted, but no nvidia module 570\.172\.08 exists for kernel 6\.8\.0-60; reboot will not fix this"
    with pytest.raises(SystemExit, match=said):
        walk.modules()


@pytest.mark.parametrize("headers", [True, False])
def test_a_kernel_that_dkms_passed_over_is_built_for(headers: bool, walk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages build for the running kernel and the newest; another one may be the next to boot."""
    started, modules = reboots(monkeypatch), {"nvidia": {"version": "570.172.08", "file": "/lib/nvidia.ko"}}
    seen: dict[str, Any] = {}
    monkeypatch.setattr(walking, "boot_kernel", lambda: "6.8.0-60")
    monkeypatch.setattr(walking, "can_build", lambda _kernel: headers)
    for where in (walking, driver):
        monkeypatch.setattr(where, "modules_on_disk", lambda _kernel: seen)
    waiting = "running: dkms builds for kernel 6.8.0-60, which boots next"
    with pytest.raises(SystemExit, match=waiting if headers else "not_done: no nvidia module"):
        walk.modules()
    assert started == (["build"] if headers else [])
    seen.update(modules)
    walk.modules()  # built meanwhile


@pytest.mark.case("reboot-module-true-before-reboot")
@pytest.mark.parametrize(
    "reads", [["\a\r\nBroadcast message", "x"], ["", ""], ["a" * 36, "a" * 36], [NEW_BOOT, NEW_BOOT[:-1] + "0"]]
)
def test_noise_is_no_new_boot(reads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Case: reboot-module-true-before-reboot."""
    answers = iter(reads)
    monkeypatch.setattr(walking, "boot_id", lambda: next(answers))
    assert walking.steady_boot_id("old") == "old"
    monkeypatch.setattr(walking, "boot_id", lambda: NEW_BOOT)
    assert walking.steady_boot_id("old") == NEW_BOOT


def test_target_back_is_the_inverse(walk: Any) -> None:
    transaction = {
        "install": {"new": "2", "moved": "2"},
        "remove": ["old"],
        "driver": "570",
        "renamed": {},
        "mains": {},
    }
    before = {"versions": {"moved": "1", "old": "1", "other": "1"}, "driver": "550"}
    target = stack.Target.back(transaction, before)
    assert (target.install, target.remove, target.driver) == ({"moved": "1", "old": "1"}, ["new"], "550")
