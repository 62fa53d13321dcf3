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
from reliability.figures import Effort, Figures, Row

ROW = Row(
    "What is acknowledged is on the disk: a power cut of the controller loses no event",
    peer="Terraform: a kill while it writes leaves an empty state file",
    source="hashicorp/terraform internal/states/statemgr/filesystem.go: the file is truncated, then written",
)

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


def cut_often(disk: Path, manner: str, cuts: int, figures: Figures) -> None:
    """Cuts under a writer at work: count acknowledged events and those missing. Every journal must be sound."""
    copy, after, seen_before = disk.with_name("after.img"), disk.with_name("after"), 0
    with mounted(disk, disk.with_name("disk")) as root:
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(root / "change"), manner], stdout=subprocess.PIPE, text=True
        )
        try:
            for cut in range(cuts):
                acknowledged = acknowledged_at_a_cut(process, disk, copy, writes=5 + 7 * (cut % 20))
                with mounted(copy, after) as seen, Journal.open(seen / "change") as journal:
                    journal.verify()
                    lost = max(0, acknowledged - journal.head()[0])
                figures.tried += acknowledged - seen_before
                figures.count(cuts=1, lost=lost)
                seen_before = acknowledged
        finally:
            process.kill()
            process.wait()
            assert process.stdout
            process.stdout.close()


def test_no_acknowledged_event_is_lost_with_the_power(disk: Path, effort: Effort, figures: Figures) -> None:
    cut_often(disk, "as it is", effort.of(full=120, short=6), figures)
    if lost := figures.counts["lost"]:
        figures.broken.append(f"{lost} acknowledged events lost")


def test_this_test_can_fail(disk: Path) -> None:
    """The same cuts under a journal that does not wait for the disk do lose events."""
    careless = Figures()
    cut_often(disk, "careless", 6, careless)
    assert careless.counts["lost"] > 0
