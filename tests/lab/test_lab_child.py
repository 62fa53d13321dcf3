"""A child process that not even SIGKILL ends: what a driver stuck in the kernel does to whoever asks it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import hostcode
import pytest
from ansible.module_utils import gpuchange_child as child

FREEZER = Path("/sys/fs/cgroup/freezer")
assert hostcode.PLAYBOOKS.is_dir()


@pytest.fixture
def ice_box() -> Iterator[Path]:
    """A cgroup of the v1 freezer: unlike v2's, it keeps even killed processes in uninterruptible sleep."""
    if not (FREEZER / "cgroup.procs").exists() or os.geteuid():
        pytest.skip("needs root and a cgroup v1 freezer")
    box = FREEZER / f"gpuchange-test-{os.getpid()}"
    box.mkdir()
    yield box
    (box / "freezer.state").write_text("THAWED")
    deadline = time.monotonic() + 10
    while (box / "cgroup.procs").read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    box.rmdir()


def test_uninterruptible_sleep_is_reported_not_waited_for(ice_box: Path) -> None:
    def freeze_myself(step: child.Step) -> dict[str, object]:
        step("the driver's door")
        (ice_box / "cgroup.procs").write_text(str(os.getpid()))
        (ice_box / "freezer.state").write_text("FROZEN")
        time.sleep(600)
        return {}

    began = time.monotonic()
    result = child.in_child(freeze_myself, 1.0, {})
    assert time.monotonic() - began < 1.0 + child.KILL_WAIT_S + 3
    assert result["hung"] is True
    assert result["step"] == "the driver's door"
    assert "state D" in result["why"]
