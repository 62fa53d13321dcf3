"""What measuring and watching cost: the harness against the bare loop that it runs.

    python benchmarks/stress.py [--seconds 4] [--rounds 3]

With a card and its driver on this machine they are used; else the lab's stand-in of libcuda, compiled on the spot,
which copies and computes for real on the processor. Bare and watched runs take turns, and the medians are compared:

    stress       rounds a second of one card: its bare loop / the same under stress_test (child, progress, nvidia-smi)
    benchmark    wall time of the samples of one metric: through the harness / the bare calls alone

Ends with 1 when a ratio is above 1.10.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import ansible.module_utils

ROOT = Path(__file__).resolve().parents[1]
ansible.module_utils.__path__.append(str(ROOT / "playbooks" / "module_utils"))

from ansible.module_utils import gpuchange_bench as bench
from ansible.module_utils import gpuchange_cuda_driver as cuda
from ansible.module_utils import gpuchange_stress as stress

MOST = 1.10
CARD = "gpu 0 GPU-857e9af9-ea7a-481c-ad34-dc36cc629378 0000:1b:00.0 85520809984 9 0 0 0 1.0 1.0 0 NVIDIA H100\n"
SOURCES = ROOT / "gpuchange" / "lab" / "gpu" / "src"


def stand_in(folder: Path) -> str:
    """Builds the lab's libcuda with one card and points the driver's door at it; what was done, in words."""
    library, proc, cards = folder / "libcuda.so.1", folder / "version", folder / "cards"
    command = ["gcc", "-O2", "-fPIC", "-shared", '-DDRIVER_VERSION="550.54.15"', "-DCUDA_VERSION=12040"]
    command += ["-o", str(library), "libcuda.c", "ptx.c"]
    subprocess.run([*command, "-lm", "-lpthread"], cwd=SOURCES, check=True)
    proc.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  x\n")
    cards.write_text(CARD)
    os.environ.update(GPUCHANGE_LAB_PROC=str(proc), GPUCHANGE_LAB_STATE=str(cards))
    cuda.LIBRARY = str(library)
    return "the lab's stand-in of libcuda: no card here"


def bare_rounds(seconds: float) -> float:
    """Rounds a second of the load in a process of its own, with nobody watching."""
    reader, writer = os.pipe()
    if not os.fork():
        driver = cuda.Driver()
        driver.call("cuInit", ctypes.c_uint(0))
        rounds = stress.load_card(driver, 0, seconds, lambda _text: None)["rounds"]
        os.write(writer, str(rounds).encode())
        os._exit(0)
    os.close(writer)
    rounds = int(os.read(reader, 64) or b"0")
    os.wait()
    os.close(reader)
    return rounds / seconds


def watched_rounds(seconds: float) -> float:
    job = {"seconds": seconds, "hang_s": 30, "since": 0, "query": ["uuid"], "python": "/nonexistent"}
    return float(stress.stress_test(job, lambda _text: None)["cards"][0]["rounds"]) / seconds


def sample_times() -> tuple[float, float]:
    """Wall seconds of as many copies: the bare calls, and through the harness."""
    driver = cuda.Driver()
    driver.call("cuInit", ctypes.c_uint(0))
    with cuda.Session(driver, 0) as session:
        host, device = session.pinned(bench.COPY_BYTES), session.allocate(bench.COPY_BYTES)
        size = ctypes.c_size_t(bench.COPY_BYTES)

        def copy() -> None:
            driver.call("cuMemcpyHtoDAsync_v2", device, host, size, None)

        def bare() -> None:
            for _ in range(bench.WARM_UPS + bench.REPEATS):
                copy()
                driver.call("cuCtxSynchronize")

        bare()
        return timed(bare), timed(lambda: bench.copy_rate(session, copy, bench.COPY_BYTES))


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        real = shutil.which("nvidia-smi") and Path("/dev/nvidiactl").exists()
        print("on", "the cards of this machine" if real else stand_in(Path(folder)))
        stress.BURST_S = 0.05  # many rounds, so that a part of one more or less does not count
        pairs = [(bare_rounds(options.seconds), watched_rounds(options.seconds)) for _ in range(options.rounds)]
        copies = [sample_times() for _ in range(2 * options.rounds)]
    loads = statistics.median(bare for bare, _ in pairs) / statistics.median(watched for _, watched in pairs)
    samples = statistics.median(ours for _, ours in copies) / statistics.median(bare for bare, _ in copies)
    print(f"stress     {loads:.3f} x the time of the bare loop a round")
    print(f"benchmark  {samples:.3f} x the wall time of the bare copies")
    return 1 if max(loads, samples) > MOST else 0


if __name__ == "__main__":
    sys.exit(main())
