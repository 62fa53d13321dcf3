"""Who works on the packages, and at what; automatic upgrades kept away by apt's own configuration."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import hostcode
import pytest
from ansible.module_utils import gpuchange_dpkg_lock as lock
from ansible.module_utils import gpuchange_upgrades as upgrades

HOLD = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); "
WAITING = HOLD + "import subprocess; subprocess.run([sys.argv[2], 'configure'])"


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds the lock while a maintainer script below it waits for an answer that never comes."""
    path, script = tmp_path / "lock", tmp_path / "var/lib/dpkg/info/nvidia-dkms-570.postinst"
    script.parent.mkdir(parents=True)
    os.mkfifo(tmp_path / "tty")
    script.write_text(f"#!/bin/sh\nread -r answer < {tmp_path}/tty\n")
    script.chmod(0o755)
    monkeypatch.setattr(lock, "LOCKS", (str(path),))
    monkeypatch.setattr(lock, "SCRIPT", lock.re.compile(lock.SCRIPT.pattern.replace("/var", r"\S*/var", 1)))
    child = subprocess.Popen([sys.executable, "-c", WAITING, str(path), str(script)], stdout=subprocess.PIPE)
    assert child.stdout
    child.stdout.readline()
    yield child
    for pid in reversed(lock.descendants(child.pid)):
        os.kill(pid, 9)
    child.wait()


@pytest.mark.case("apt-prompt-leaves-orphan-dpkg")
def test_the_holder_is_named_with_what_it_waits_for(held: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 20
    while "waiting for input" not in (said := lock.said(lock.lock_holder() or {"pid": 0, "command": "", "at": ""})):
        assert time.monotonic() < deadline, said
    assert said.startswith(f"pid {held.pid} (") and "in nvidia-dkms-570.postinst (pid " in said
    assert lock.await_lock(0.1)["pid"] == held.pid  # type: ignore[index]


def test_a_free_lock_has_no_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lock").touch()
    monkeypatch.setattr(lock, "LOCKS", (str(tmp_path / "lock"), str(tmp_path / "absent")))
    assert lock.await_lock(5.0) is None
    assert lock.at_work(os.getpid()) == ""


@pytest.fixture
def block_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "apt.conf.d/zz-gpuchange"
    path.parent.mkdir()
    monkeypatch.setattr(upgrades, "BLOCK_FILE", str(path))
    return path


def test_upgrades_are_blocked_once_and_given_back_once(block_file: Path) -> None:
    assert upgrades.block() and not upgrades.block() and upgrades.blocked()
    block_file.write_text("// torn")  # by a power cut, or somebody's hand: it blocks nothing
    assert not upgrades.blocked() and upgrades.block() and upgrades.blocked()
    assert upgrades.give_back() and not upgrades.give_back()
    assert not block_file.exists()


@pytest.mark.skipif(shutil.which("apt-config") is None, reason="needs apt")
def test_apt_itself_reads_the_block(block_file: Path) -> None:
    upgrades.block()
    said = subprocess.run(
        ["apt-config", "dump"],
        env={**os.environ, "APT_CONFIG": str(block_file)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert 'APT::Periodic::Enable "0";' in said and 'Unattended-Upgrade::Package-Blacklist:: ".*";' in said


def test_a_drained_host_needs_the_block_to_count_as_drained(block_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not upgrades.blocked()
    upgrades.block()
    assert upgrades.blocked()
    monkeypatch.setattr(upgrades, "BLOCK_FILE", "/nowhere/apt.conf.d/zz")
    assert upgrades.blocked()  # where there is no apt there is nothing to block
    assert hostcode.PLAYBOOKS
