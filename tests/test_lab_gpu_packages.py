"""The lab's package repository and its driver library: whole, consistent, and strict where the real ones are."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path

import hostcode
import pytest
from ansible.module_utils import gpuchange_cuda_driver as cuda

from gpuchange.errors import LabError
from gpuchange.lab.gpu import catalog, install_guest, packages
from gpuchange.lab.gpu.cards import default_cards

TOOLS_THERE = all(shutil.which(tool) for tool in packages.TOOLS)
needs_tools = pytest.mark.skipif(not TOOLS_THERE, reason=f"needs {', '.join(packages.TOOLS)}")
PROVIDED_BY_DEBIAN = {"kmod", "python3"}
assert hostcode.PLAYBOOKS.is_dir()


@pytest.fixture(scope="session")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("apt") / "repo"
    packages.build_repo(out)
    return out


def index(folder: Path) -> set[tuple[str, str]]:
    text = (folder / "Packages").read_text()
    return set(re.findall(r"^Package: (.*)\n(?:.+\n)*?Version: (.*)$", text, re.M))


def test_every_dependency_is_in_the_repository() -> None:
    rows = catalog.catalog("6.1.0-test")
    there = {package.name: {p.version for p in rows if p.name == package.name} for package in rows}
    for package in rows:
        for depends in package.depends:
            name, _, relation = depends.partition(" ")
            if name in PROVIDED_BY_DEBIAN:
                continue
            assert name in there, f"{package.name} depends on {name}"
            if relation.startswith("(= "):
                assert relation[3:-1] in there[name], f"{package.name} {package.version} depends on {depends}"


def test_names_and_versions_are_unique() -> None:
    rows = [(package.name, package.version) for package in catalog.catalog("6.1.0-test")]
    assert len(rows) == len(set(rows))


def test_two_branches_of_the_driver_exclude_each_other() -> None:
    old, new = (catalog.driver(version) for version in ("550.54.15", "570.172.08"))
    assert {p.name for p in old}.isdisjoint(p.name for p in new)
    assert {p.provides for p in old} == {p.provides for p in new} and all(p.provides for p in old)


@needs_tools
def test_the_repository_holds_all_versions_side_by_side(repo: Path) -> None:
    wanted = {(package.name, package.version) for package in catalog.catalog(os.uname().release)}
    assert index(repo) == wanted
    assert {f"{name}={version}" for name, version in wanted} >= set(packages.NEW)


@needs_tools
def test_the_second_index_holds_newest_versions_only(repo: Path) -> None:
    newest = dict(index(repo / packages.NEWEST_ONLY))
    assert newest["libcudnn9-cuda-12"] == "9.8.0.87-1"
    assert newest["nvidia-utils-550"] == "550.163.01-0ubuntu1"  # 163 is newer than 54, whatever text order says
    assert set(newest) == {name for name, _ in index(repo)}


@needs_tools
def test_files_of_two_versions_differ(repo: Path) -> None:
    def contents(version: str) -> str:
        deb = repo / f"pool/libnvidia-compute-550_{version}_amd64.deb"
        return subprocess.run(["dpkg-deb", "-c", deb], capture_output=True, text=True, check=True).stdout

    assert "libcuda.so.550.54.15" in contents("550.54.15-0ubuntu1")
    assert "libcuda.so.550.163.01" in contents("550.163.01-0ubuntu1")


def test_a_missing_tool_is_named_with_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LabError) as caught:
        packages.build_repo(tmp_path / "repo")
    assert "apt-get install" in caught.value.remedy and "gcc" in caught.value.remedy


def test_cards_are_the_hosts_own() -> None:
    first, second = default_cards("h1", 8), default_cards("h2", 8)
    assert default_cards("h1", 8) == first
    for key in ("uuid", "serial"):
        assert len({card[key] for cards in (first, second) for card in cards["cards"]}) == 16
    with pytest.raises(ValueError, match="1 to 8"):
        default_cards("h1", 9)


def test_guest_scripts_are_executable_whatever_a_wheel_did(tmp_path: Path) -> None:
    install_guest(tmp_path)
    install_guest(tmp_path)  # twice is once
    scripts = [p for p in tmp_path.rglob("*") if p.is_file() and p.read_bytes().startswith(b"#!")]
    assert len(scripts) >= 5 and all(os.access(p, os.X_OK) for p in scripts)


# --- the driver library --------------------------------------------------------------------------------------


@pytest.fixture
def library(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """libcuda out of its package, initialized with one card."""
    subprocess.run(
        ["dpkg-deb", "-x", repo / "pool/libnvidia-compute-550_550.54.15-0ubuntu1_amd64.deb", tmp_path], check=True
    )
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue\n")
    (tmp_path / "cards").write_text(
        f"gpu 0 GPU-{'0' * 8}-0000-4000-8000-{'1' * 12} 0000:1b:00.0 1048576 9 0 0 0 1.0 1.0 0 Card\n"
    )
    monkeypatch.setenv("GPUCHANGE_LAB_PROC", str(tmp_path / "version"))
    monkeypatch.setenv("GPUCHANGE_LAB_STATE", str(tmp_path / "cards"))
    made = ctypes.CDLL(str(tmp_path / "usr/lib/x86_64-linux-gnu/libcuda.so.1"))
    assert made.cuInit(0) == 0
    context = ctypes.c_void_p()
    assert made.cuCtxCreate_v2(ctypes.byref(context), 0, 0) == 0
    return made


def load(library: ctypes.CDLL, ptx: bytes) -> int:
    return int(library.cuModuleLoadData(ctypes.byref(ctypes.c_void_p()), ctypes.c_char_p(ptx)))


@needs_tools
def test_the_products_kernels_assemble(library: ctypes.CDLL) -> None:
    assert load(library, cuda.PTX) == 0


@needs_tools
@pytest.mark.parametrize(
    ("find", "put", "code"),
    [
        (b"add.s64", b"add.s65", 218),  # no such type
        (b"mad.lo.s32", b"mod.lo.s32", 218),  # no such instruction
        (b".version 6.0", b"", 200),  # not PTX
        (b"    ret;\n", b"", 218),  # runs off its end
    ],
)
def test_bad_kernels_are_refused_as_by_a_real_driver(library: ctypes.CDLL, find: bytes, put: bytes, code: int) -> None:
    assert load(library, cuda.PTX.replace(find, put)) == code


@needs_tools
def test_memory_is_bounded_and_checked(library: ctypes.CDLL) -> None:
    pointer = ctypes.c_uint64()
    assert library.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(2 << 20)) == 2  # out of memory
    assert library.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(1024)) == 0
    data = ctypes.create_string_buffer(2048)
    assert library.cuMemcpyHtoD_v2(pointer, data, ctypes.c_size_t(2048)) == 1  # past the end
    assert library.cuMemFree_v2(pointer) == 0
    assert library.cuMemFree_v2(pointer) == 1


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="needs ptxas, NVIDIA's own assembler")
def test_nvidias_assembler_accepts_the_kernels(tmp_path: Path) -> None:
    (tmp_path / "k.ptx").write_bytes(cuda.PTX)
    known = subprocess.run(["ptxas", "--help"], capture_output=True, text=True, check=True).stdout
    cards = sorted(set(re.findall(r"'(sm_\d+)'", known)))
    assert cards  # which ones depends on the assembler's age
    for card in cards:
        subprocess.run(["ptxas", f"-arch={card}", "-o", tmp_path / "k.cubin", tmp_path / "k.ptx"], check=True)
