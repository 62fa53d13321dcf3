"""The wheel: all that a change needs is inside, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STRAY = (".pyc", ".db", ".log", ".orig", "~")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


def below(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_playbooks_are_inside(wheel: zipfile.ZipFile) -> None:
    inside = {name.removeprefix("gpuchange/playbooks/") for name in wheel.namelist() if "/playbooks/" in name}
    assert inside == below(ROOT / "playbooks")


def test_the_package_is_whole(wheel: zipfile.ZipFile) -> None:
    inside = {name.removeprefix("gpuchange/") for name in wheel.namelist() if name.startswith("gpuchange/")}
    assert below(ROOT / "gpuchange") <= inside


def test_nothing_stray_is_inside(wheel: zipfile.ZipFile) -> None:
    assert [name for name in wheel.namelist() if name.endswith(STRAY) or "__pycache__" in name] == []


def test_executables_stay_executable(wheel: zipfile.ZipFile) -> None:
    modes = {info.filename.removeprefix("gpuchange/"): info.external_attr >> 16 for info in wheel.infolist()}
    wanted = {name for name in below(ROOT / "gpuchange") if (ROOT / "gpuchange" / name).stat().st_mode & 0o100}
    assert {name for name in wanted if not modes[name] & 0o100} == set()


def test_the_licence_comes_along(wheel: zipfile.ZipFile) -> None:
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())


def test_the_base_install_does_not_pull_the_ansible_bundle(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
    lines = wheel.read(name).decode().splitlines()
    needed = [line.split()[1] for line in lines if line.startswith("Requires-Dist:") and "extra ==" not in line]
    names = {requirement.split(">")[0] for requirement in needed}
    assert {"ansible-core", "ansible-runner"} <= names
    assert "ansible" not in names
