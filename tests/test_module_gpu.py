"""The GPU tester against a libcuda that really copies and computes: right, wrong, slow, broken, hanging, dying."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import hostcode  # noqa: F401  (puts module_utils on Ansible's path)
import pytest
from ansible.module_utils import gpuchange_bench as bench
from ansible.module_utils import gpuchange_child as child
from ansible.module_utils import gpuchange_cuda as cuda
from ansible.module_utils import gpuchange_cuda_driver as driver
from ansible.module_utils import gpuchange_stress as stress

from gpuchange.checks.gpu_function import judge_function

SOURCE = Path(__file__).parent.parent / "gpuchange/lab/gpu/src"
UUIDS = ("GPU-857e9af9-ea7a-481c-ad34-dc36cc629378", "GPU-70ec2991-a3b7-446a-a34a-86ab64880e78")
CARD = "gpu {index} {uuid} 0000:{bus}:00.0 85520809984 9 0 {lost} {wrong} {slow} {link} {hang} NVIDIA H100 80GB HBM3\n"

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc to build the stand-in driver library")


def compile_library(target: Path, *sources: str, version: str = "550.54.15") -> Path:
    defines = [f'-DDRIVER_VERSION="{version}"', "-DCUDA_VERSION=12040"]
    command = ["gcc", "-O1", "-fPIC", "-shared", *defines, "-o", str(target), *sources, "-lm", "-lpthread"]
    subprocess.run(command, cwd=SOURCE, check=True, stdin=subprocess.DEVNULL)
    return target


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_library(tmp_path_factory.mktemp("cuda") / "libcuda.so.1", "libcuda.c", "ptx.c")


class Machine:
    """The files that the stand-in library reads instead of a kernel's."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.state = folder / "version", folder / "cards"
        self.load("550.54.15")
        self.cards({}, {})

    def load(self, version: str) -> None:
        self.proc.write_text(f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Tue Mar  5 2024\n")

    def cards(self, *changes: dict[str, Any]) -> None:
        rows = [
            {
                "index": i,
                "uuid": UUIDS[i],
                "bus": ("1b", "43")[i],
                "lost": 0,
                "wrong": 0,
                "slow": 1.0,
                "link": 1.0,
                "hang": 0,
            }
            | change
            for i, change in enumerate(changes)
        ]
        self.state.write_text("".join(CARD.format(**row) for row in rows))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: Path) -> Machine:
    made = Machine(tmp_path)
    monkeypatch.setattr(driver, "LIBRARY", str(library))
    monkeypatch.setattr(cuda, "COPY_BYTES", 4 << 20)
    monkeypatch.setattr(cuda, "KERNEL_ELEMENTS", 1 << 14)
    monkeypatch.setattr(bench, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(bench, "WITHIN_BYTES", 1 << 20)
    monkeypatch.setattr(bench, "FMA_THREADS", 4)
    monkeypatch.setattr(stress, "CHUNK_BYTES", 1 << 20)
    monkeypatch.setattr(stress, "AREA_BYTES", 4 << 20)
    monkeypatch.setattr(stress, "BURST_S", 0.05)
    monkeypatch.setenv("GPUCHANGE_LAB_PROC", str(made.proc))
    monkeypatch.setenv("GPUCHANGE_LAB_STATE", str(made.state))
    return made


def test_healthy_cards(machine: Machine) -> None:
    result = cuda.function_test()
    assert result["ok"]
    assert [card["uuid"] for card in result["cards"]] == list(UUIDS)
    assert [card["pci"] for card in result["cards"]] == ["0000:1b:00.0", "0000:43:00.0"]
    assert result["driver_api"] == 12040
    assert {c["mismatches"] for card in result["cards"] for c in card["checks"].values()} == {0}
    assert judge_function(result, UUIDS).outcome == "accept"


def test_wrong_values_name_the_card_and_count(machine: Machine) -> None:
    machine.cards({}, {"wrong": 1})
    result = cuda.function_test()
    first, second = result["cards"]
    assert first["ok"] and not second["ok"]
    assert second["checks"]["words"]["mismatches"] > 0 and second["checks"]["floats"]["mismatches"] > 0
    assert UUIDS[1] in result["why"] and UUIDS[0] not in result["why"]


def test_driver_mismatch_gives_the_drivers_own_words(machine: Machine) -> None:
    machine.load("570.172.08")
    result = cuda.function_test()
    assert result["error"]["call"] == "cuInit" and result["error"]["code"] == 803
    assert "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" in result["why"]


def test_no_module_no_library_no_card(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.cards({"lost": 1})
    assert "CUDA_ERROR_NO_DEVICE" in cuda.function_test()["why"]
    machine.proc.unlink()
    assert "CUDA_ERROR_NO_DEVICE" in cuda.function_test()["why"]
    monkeypatch.setattr(driver, "LIBRARY", "libcuda-is-not-here.so.1")
    result = cuda.function_test()
    assert result["error"]["call"] == "dlopen" and "libcuda-is-not-here" in result["why"]


def test_an_old_driver_without_a_function(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "old.c"
    source.write_text("int cuInit(unsigned f) { return 0; }\n")
    monkeypatch.setattr(driver, "LIBRARY", str(compile_library(tmp_path / "old.so", str(source))))
    assert "does not have this function" in cuda.function_test()["why"]


def test_bench_sees_a_slow_card(machine: Machine) -> None:
    machine.cards({}, {"slow": 3.0})
    fast, slow = (card["metrics"] for card in bench.bench_test()["cards"])
    for name in ("h2d", "d2h", "d2d", "fp32"):
        assert fast[name]["median"] == pytest.approx(3 * slow[name]["median"], rel=0.01), name
    assert slow["launch"]["median"] == pytest.approx(3 * fast["launch"]["median"], rel=0.01)
    assert fast["fp32"]["median"] == pytest.approx(54_000, rel=0.01)  # the library's own clock: size does not matter
    assert fast["peer"]["median"] < 0.6 * 153  # GB/s of so small a copy between healthy cards: the next one is slow


def test_a_single_card_has_no_next_one(machine: Machine) -> None:
    machine.cards({})
    (card,) = bench.bench_test()["cards"]
    assert set(card["metrics"]) == {"h2d", "d2h", "d2d", "fp32", "launch"}


def test_half_a_link_shows_in_copies_to_the_host_only(machine: Machine) -> None:
    machine.cards({}, {"link": 0.5})
    whole, half = (card["metrics"] for card in bench.bench_test()["cards"])
    assert whole["h2d"]["median"] > 1.4 * half["h2d"]["median"]  # a small copy also pays for being begun
    assert half["d2d"]["median"] == pytest.approx(whole["d2d"]["median"], rel=0.01)
    assert half["fp32"]["median"] == pytest.approx(whole["fp32"]["median"], rel=0.01)


JOB = {"seconds": 0.3, "hang_s": 20, "since": 0, "query": ["uuid"], "python": "/nonexistent/python"}


def test_stress_loads_all_cards_and_counts_rounds(machine: Machine) -> None:
    said: list[str] = []
    result = stress.stress_test(JOB, said.append)
    assert result["ok"] and [card["uuid"] for card in result["cards"]] == list(UUIDS)
    assert all(card["rounds"] > 0 for card in result["cards"])
    assert result["load"] == "built-in" and "not installed" in result["note"]
    assert any(text.startswith("stress: ") and text.endswith(" s") for text in said)


def test_stress_names_the_card_that_computes_wrong(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "FMA_THREADS", 64)
    machine.cards({}, {"wrong": 1})
    result = stress.stress_test(JOB, lambda _text: None)
    good, bad = result["cards"]
    assert good["ok"] and not bad["ok"] and bad["wrong"]["fma"] > 0
    assert UUIDS[1] in result["why"] and "fma" in result["why"]


def test_a_kernel_that_never_ends_costs_the_hang_limit_and_the_other_card_goes_on(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.Fma, "calibrated", lambda _fma: 1)  # its launches are as many as the machine is slow
    machine.cards({}, {"hang": 1})
    began = time.monotonic()
    result = stress.stress_test({**JOB, "seconds": 2, "hang_s": 2}, lambda _text: None)
    assert time.monotonic() - began < 20
    good, bad = result["cards"]
    assert good["ok"] and good["rounds"] > 0
    assert bad["stalled"] and bad["why"].startswith("no progress for 2 s at round")


def test_a_load_that_found_no_time_still_does_a_round(machine: Machine) -> None:
    """No round would be no proof: on a crowded machine getting ready may take longer than the whole load."""
    machine.cards({}, {"wrong": 1})
    good, bad = stress.stress_test({**JOB, "seconds": 0}, lambda _text: None)["cards"]
    assert good["rounds"] == bad["rounds"] == 1 and good["ok"]


def test_stress_without_a_driver_says_so(machine: Machine) -> None:
    machine.proc.unlink()
    result = stress.stress_test(JOB, lambda _text: None)
    assert not result["ok"] and "CUDA_ERROR_NO_DEVICE" in result["why"]


def broken_library(tmp_path: Path, body: str) -> str:
    source = tmp_path / "broken.c"
    source.write_text(f"#include <signal.h>\n#include <unistd.h>\nint cuInit(unsigned f) {{ {body}; return 0; }}\n")
    return str(compile_library(tmp_path / "broken.so", str(source)))


def test_a_hanging_driver_costs_the_deadline_only(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "LIBRARY", broken_library(tmp_path, "signal(SIGTERM, SIG_IGN); for (;;) pause()"))
    began = time.monotonic()
    result = cuda.function_test(deadline_s=0.5)
    assert time.monotonic() - began < 3
    assert not result["ok"] and result["timed_out"] and "cuInit" in result["why"]
    assert judge_function(result, UUIDS).outcome == "reject"


def test_a_crashing_driver_is_named(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "LIBRARY", broken_library(tmp_path, "raise(SIGSEGV)"))
    result = cuda.function_test()
    assert "died at cuInit: ended by signal 11" in result["why"]


def test_a_child_that_cannot_be_killed_is_reported_as_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL is withheld here, because a test cannot make a process uninterruptible on every machine."""
    pids: list[int] = []
    monkeypatch.setattr(child, "KILL_WAIT_S", 0.2)
    monkeypatch.setattr(child.os, "kill", lambda pid, _signal: pids.append(pid))
    result = child.in_child(lambda step: {"never": time.sleep(600)}, 0.2, {})
    assert result["hung"] and "cannot even be killed" in result["why"]
    monkeypatch.undo()
    os.kill(pids[0], 9)
    os.waitpid(pids[0], 0)


def test_the_child_holds_none_of_our_files(tmp_path: Path) -> None:
    """A hung child with the play's stdout would keep the connection open for ever."""
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    names = child.in_child(lambda step: {"files": sorted(os.readlink(f"/proc/self/fd/{n}") for n in range(3))}, 5, {})
    held = child.in_child(lambda step: {"held": os.path.exists(f"/proc/self/fd/{writer}")}, 5, {})
    os.close(reader)
    os.close(writer)
    assert names["files"] == ["/dev/null"] * 3
    assert held["held"] is False


def test_a_login_shells_choice_of_cards_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    seen = child.in_child(
        lambda step: {"env": {k: v for k, v in os.environ.items() if "CUDA" in k}}, 5, cuda.ENVIRONMENT
    )
    assert seen["env"] == cuda.ENVIRONMENT


def test_an_exception_in_the_child_is_said() -> None:
    assert "ZeroDivisionError" in child.in_child(lambda step: {"x": 1 // 0}, 5, {})["why"]


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120"])
def test_nvidias_own_assembler_takes_our_kernels(arch: str) -> None:
    """PTX to machine code needs no card, only libnvJitLink (in pip's nvidia-nvjitlink)."""
    path = os.environ.get("GPUCHANGE_TEST_NVJITLINK")
    if not path:
        pytest.skip("GPUCHANGE_TEST_NVJITLINK names no libnvJitLink.so")
    library, handle, size = ctypes.CDLL(path), ctypes.c_void_p(), ctypes.c_size_t()
    suffix = os.environ.get("GPUCHANGE_TEST_NVJITLINK_SYMBOLS", "_13_4")  # its functions carry their version

    def call(name: str, *arguments: Any) -> None:
        assert getattr(library, f"__nvJitLink{name}{suffix}")(*arguments) == 0, name

    call("Create", ctypes.byref(handle), ctypes.c_uint32(1), (ctypes.c_char_p * 1)(f"-arch={arch}".encode()))
    text = driver.PTX + b"\0"
    call("AddData", handle, ctypes.c_int(2), text, ctypes.c_size_t(len(text)), b"kernels")
    call("Complete", handle)
    call("GetLinkedCubinSize", handle, ctypes.byref(size))
    assert size.value > 1000
