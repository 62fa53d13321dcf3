"""The hash manifest against `xargs -P2 openssl dgst -sha256` on the same files.

    python benchmarks/hashing.py [--gib 4] [--files 8] [--rounds 3] [--dir DIRECTORY]
    python benchmarks/hashing.py --lab NAME [--host gpu1] ...      the same on a lab host

Both read the same files in turns, caches warm, two at a time. Prints wall seconds (median), MiB/s, the largest resident
memory and the ratio. Ends with 1 when the ratio is above 1.15 or the memory above 64 MiB.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve()
PROGRAMS = HERE.parent.parent / "playbooks" / "module_utils"
NEEDED = ("gpuchange_hashing.py", "gpuchange_walk.py", "gpuchange_manifest_stream.py")
MIB = 1024 * 1024
MOST_RATIO, MOST_MEMORY_MIB = 1.15, 64.0
FOLDER = "/root/hashing-benchmark"
WATCHED = (
    "import runpy, sys; sys.argv = sys.argv[1:]\n"
    "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
    "except SystemExit: print(open('/proc/self/status').read())"
)


def write_files(folder: Path, count: int, size_mib: int) -> None:
    """Random content, so that no filesystem can make holes or share blocks of it."""
    folder.mkdir()
    for number in range(count):
        with open(folder / f"{number:03}.bin", "wb") as file:
            for _ in range(size_mib):
                file.write(os.urandom(MIB))
    os.sync()


def ours(folder: Path, work: Path) -> tuple[float, float]:
    """(seconds, peak MiB) of the hashing program as the host unit runs it."""
    job = work / "job.json"
    job.write_text(json.dumps({"roots": [[str(folder), str(folder)]], "out": str(work / "manifest"), "threads": 2}))
    program = next(path for path in (HERE.parent, PROGRAMS) if (path / NEEDED[0]).is_file()) / NEEDED[0]
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, str(program), str(job)], capture_output=True, text=True, check=True
    )
    taken = time.perf_counter() - began
    peak = next(line.split()[1] for line in done.stdout.splitlines() if line.startswith("VmHWM:"))
    return taken, int(peak) / 1024


def theirs(folder: Path) -> float:
    command = f"find {shlex.quote(str(folder))} -type f -print0 | xargs -0 -P2 -n1 openssl dgst -sha256"
    began = time.perf_counter()
    subprocess.run(["sh", "-c", command], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


def measure(folder: Path, rounds: int) -> int:
    pairs, peak = [], 0.0
    work = folder.parent
    theirs(folder)  # both start with warm caches
    for _ in range(rounds):
        taken, used = ours(folder, work)
        pairs.append((taken, theirs(folder)))
        peak = max(peak, used)
    size = sum(path.stat().st_size for path in folder.iterdir()) / MIB
    mine, other = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(one / two for one, two in pairs)
    print(f"{size / 1024:.1f} GiB in {len(list(folder.iterdir()))} files, {rounds} rounds, {os.cpu_count()} cores")
    print(f"{'xargs -P2 openssl':20} {other:7.2f} s {size / other:8.0f} MiB/s   1.00")
    print(
        f"{'gpuchange manifest':20} {mine:7.2f} s {size / mine:8.0f} MiB/s   {ratio:4.2f}   peak memory {peak:.0f} MiB"
    )
    return int(ratio > MOST_RATIO or peak > MOST_MEMORY_MIB)


def on_lab_host(name: str, host: str, passed: list[str]) -> int:
    """Copy this benchmark and the hashing program to a lab host and run it there. Raises LabError when it fails."""
    from gpuchange.lab import Lab

    there = Lab.load(name).host(host)
    target = there.root / FOLDER.lstrip("/")
    target.mkdir(exist_ok=True)
    try:
        for path in (HERE, *(PROGRAMS / needed for needed in NEEDED)):
            shutil.copy(path, target)
        print(there.run(["python3", f"{FOLDER}/{HERE.name}", *passed, "--dir", FOLDER], timeout=1800), end="")
    finally:
        shutil.rmtree(target)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", default=None)
    parser.add_argument("--lab", default=None)
    parser.add_argument("--host", default="gpu1")
    given = parser.parse_args()
    if given.lab:
        sizes = ["--gib", str(given.gib), "--files", str(given.files), "--rounds", str(given.rounds)]
        return on_lab_host(given.lab, given.host, sizes)
    with tempfile.TemporaryDirectory(dir=given.dir) as scratch:
        folder = Path(scratch) / "files"
        write_files(folder, given.files, max(1, int(given.gib * 1024 / given.files)))
        return measure(folder, given.rounds)


if __name__ == "__main__":
    sys.exit(main())
