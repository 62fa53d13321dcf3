"""Power cuts under the journal: a real ext4 on a loop device, of which only what reached the device survives."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpuchange.journal import Journal

CUTS = 6

WRITER = """
import sys
from gpuchange.journal import Journal
from gpuchange.states import Event, Kind
journal = Journal.open(sys.argv[1])
if sys.argv[2] == "careless":
    journal._database.execute("PRAGMA synchronous = NORMAL")
while True:
    print(journal.append([(Event(Kind.NOTE, "gpu1", data={"n": 1}), {"lines": ["x"] * 9})])[-1].seq, flush=True)
"""


def tool(*argv: str | Path) -> None:
    subprocess.run([str(part) for part in argv], check=True, capture_output=True)


@contextmanager
def mounted(image: Path, at: Path) -> Iterator[Path]:
    at.mkdir(exist_ok=True)
    tool("mount", "-o", "loop", image, at)
    try:
        yield at
    finally:
        tool("umount", at)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """An image with an ext4 on it, holding a new journal."""
    if os.geteuid() != 0 or not shutil.which("mkfs.ext4"):
        pytest.skip("needs root and mkfs.ext4")
    image = tmp_path / "disk.img"
    with image.open("wb") as file:
        file.truncate(48 << 20)
    tool("mkfs.ext4", "-q", image)
    with mounted(image, tmp_path / "disk") as root:
        Journal.create(root / "change", {"hosts": ["gpu1"]}).close()
    yield image


def acknowledged_at_a_cut(process: subprocess.Popen[str], image: Path, copy: Path, writes: int) -> int:
    """Let the writer go on for some writes, stop it dead, and keep what reached the device by then."""
    assert process.stdout
    last = 0
    for _ in range(writes):
        last = int(process.stdout.readline())
    process.send_signal(signal.SIGSTOP)
    shutil.copyfile(image, copy)
    process.send_signal(signal.SIGCONT)
    return last


def lost_rows(disk: Path, manner: str) -> int:
    """How many acknowledged events are missing after the cuts, all together. Every journal must be sound."""
    lost, copy, after = 0, disk.with_name("after.img"), disk.with_name("after")
    with mounted(disk, disk.with_name("disk")) as root:
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(root / "change"), manner], stdout=subprocess.PIPE, text=True
        )
        try:
            for cut in range(CUTS):
                acknowledged = acknowledged_at_a_cut(process, disk, copy, writes=5 + 7 * cut)
                with mounted(copy, after) as seen, Journal.open(seen / "change") as journal:
                    journal.verify()
                    lost += max(0, acknowledged - journal.head()[0])
        finally:
            process.kill()
            process.wait()
            assert process.stdout
            process.stdout.close()
    return lost


def test_no_acknowledged_event_is_lost_with_the_power(disk: Path) -> None:
    assert lost_rows(disk, "as it is") == 0


def test_this_test_can_fail(disk: Path) -> None:
    """The same cuts under a journal that does not wait for the disk do lose events."""
    assert lost_rows(disk, "careless") > 0
