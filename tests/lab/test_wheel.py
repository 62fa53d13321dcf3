"""The wheel in an empty environment, used from another directory: playbooks, lab and all come out of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from gpuchange.lab import Lab
from tests.lab.changes import ROOT, plan_for

INSTALL_TIMEOUT, APPLY_TIMEOUT = 600, 420


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command `gpuchange` as pip made it, in a virtual environment that holds nothing else."""
    place = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(place), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, timeout=INSTALL_TIMEOUT)
    subprocess.run([sys.executable, "-m", "venv", str(place / "venv")], check=True, timeout=INSTALL_TIMEOUT)
    (wheel,) = place.glob("*.whl")
    pip = [str(place / "venv/bin/python"), "-m", "pip", "install", "-q", "--disable-pip-version-check", str(wheel)]
    subprocess.run(pip, check=True, timeout=INSTALL_TIMEOUT)
    return place / "venv/bin/gpuchange"


def run(installed: Path, directory: Path, *arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """The installed command, away from the checkout and with nothing of its environment."""
    kept = {name: os.environ[name] for name in ("HOME", "PATH", "LANG", "GPUCHANGE_LAB_DIR") if name in os.environ}
    env = {**kept, "GPUCHANGE_STATE": str(directory / "state")}
    command = [str(installed), *arguments]
    return subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, timeout=timeout, check=False)


def test_what_is_installed_is_used(installed: Path, tmp_path: Path) -> None:
    said = run(installed, tmp_path, "doctor")
    assert said.returncode == 0, said.stdout + said.stderr
    assert str(installed.parents[1]) in next(line for line in said.stdout.splitlines() if "playbooks" in line)
    assert str(ROOT) not in said.stdout


def test_init_and_validate(installed: Path, tmp_path: Path) -> None:
    assert run(installed, tmp_path, "init").returncode == 0
    said = run(installed, tmp_path, "validate", "plan.yaml")
    assert (said.returncode, said.stderr) == (0, "")


def test_lab_up_and_apply(installed: Path, tmp_path: Path, fresh_hosts: Lab) -> None:
    up = run(installed, tmp_path, "lab", "up", "--name", fresh_hosts.name, "--hosts", "3", timeout=APPLY_TIMEOUT)
    assert up.returncode == 0, up.stderr
    plan = plan_for(fresh_hosts, hosts=["gpu1"], watch={"for": "1s"})
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan, sort_keys=False))
    said = run(installed, tmp_path, "apply", "plan.yaml", "--yes", timeout=APPLY_TIMEOUT)
    assert said.returncode == 0, said.stdout + said.stderr
    assert "driver 550.54.15 → 570.172.08" in said.stdout
    status = run(installed, tmp_path, "status")
    assert "done" in status.stdout
