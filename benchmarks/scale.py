"""Planner and journal at fleet size: time per host, memory, and how long a resume takes to read the journal back.

    python benchmarks/scale.py [--sizes 1000 3000 10000] [--directory DIR]

Every host takes every phase of the product's table; 5 % may be out at once; hosts take 1 to 30 simulated seconds a step
and the clock jumps, so that all the time measured is ours. Each play's intents are one durable transaction, and so
are all outcomes of one moment, as in the engine. Give a directory on a real disk: on tmpfs a commit costs nothing.
Each size runs in its own process; resume (open, read and fold every event) is measured in a fresh one. "CPU" is this
process's processor time, which a busy machine does not falsify; "wall" also has the waits for the disk.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "tests"), str(Path(__file__).parents[1])]

from simulate import Outcome, Simulation, full_table

from gpuchange.journal import Journal
from gpuchange.planner import Limits, Start, State, decide, exit_code

LIMITS = {"linear": 1.3, "megabytes": 300, "resume": 5.0}


class Watch:
    """Seconds since it was made, on the wall and of this process's processor time."""

    def __init__(self) -> None:
        self._began = time.perf_counter(), time.process_time()

    @property
    def wall(self) -> float:
        return time.perf_counter() - self._began[0]

    @property
    def cpu(self) -> float:
        return time.process_time() - self._began[1]


def megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def carry_through(hosts: int, directory: Path) -> dict[str, float]:
    dice = random.Random(hosts)
    names = [f"gpu{number:05}" for number in range(hosts)]

    def behave(_start: Start, _host: str) -> Outcome:
        return Outcome(after=dice.randint(1, 30), data={"why": "as wanted"})

    watch = Watch()
    with Journal.create(directory, {"hosts": names}) as journal:
        run = Simulation(full_table(), names, Limits(hosts // 20), behave, journal=journal, keep=False)
        run.run()
        found = {"cpu": watch.cpu, "wall": watch.wall, "plays": run.plays, "commits": run.commits}
        assert exit_code(run.state) == 0 and run.most_out <= hosts // 20
        return found | {"events": journal.head()[0], "megabytes": megabytes()}


def resume(directory: Path) -> dict[str, float]:
    watch = Watch()
    with Journal.open(directory) as journal:
        state = State(full_table(), journal.meta["hosts"])
        for event in journal.events():
            state.apply(event)
        assert decide(state, Limits(len(state.names) // 20), 0.0).finished
        found = {"resume_cpu": watch.cpu, "resume_wall": watch.wall, "resume_megabytes": megabytes()}
        watch = Watch()
        journal.verify()
        return found | {"verify_cpu": watch.cpu}


def measured(what: str, hosts: int, directory: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--only", what, "--sizes", str(hosts), "--directory", str(directory)]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def table(sizes: list[int], root: Path) -> list[dict[str, float]]:
    rows = []
    print(" hosts   events  commits | ms/host: CPU    wall     MB | resume s: CPU   wall     MB | verify s  journal MB")
    for hosts in sizes:
        with tempfile.TemporaryDirectory(dir=root) as directory:
            home = Path(directory) / "change"
            row = measured("run", hosts, home) | measured("resume", hosts, home)
            row["size"] = (home / "journal.db").stat().st_size / 2**20
        row |= {"cpu_ms": row["cpu"] / hosts * 1000, "wall_ms": row["wall"] / hosts * 1000}
        rows.append(row)
        print(
            "{hosts:6} {events:8.0f} {commits:8.0f} | {cpu_ms:12.2f} {wall_ms:7.2f} {megabytes:6.0f} | "
            "{resume_cpu:13.2f} {resume_wall:6.2f} {resume_megabytes:6.0f} | {verify_cpu:8.2f} {size:11.0f}".format(
                hosts=hosts, **row
            ),
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 3000, 10000])
    parser.add_argument("--directory", type=Path, default=Path.cwd())
    parser.add_argument("--only", choices=["run", "resume"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        work = (
            carry_through(options.sizes[0], options.directory) if options.only == "run" else resume(options.directory)
        )
        print(json.dumps(work))
        return
    rows = table(options.sizes, options.directory)
    growth = rows[-1]["cpu_ms"] / rows[0]["cpu_ms"]
    peak = max(max(row["megabytes"], row["resume_megabytes"]) for row in rows)
    slowest = max(row["resume_cpu"] for row in rows)
    print(f"CPU per host, largest fleet against smallest: {growth:.2f} (at most {LIMITS['linear']})")
    print(f"peak memory: {peak:.0f} MB (below {LIMITS['megabytes']})")
    print(f"slowest resume: {slowest:.2f} s CPU (below {LIMITS['resume']})")
    sys.exit(growth > LIMITS["linear"] or peak >= LIMITS["megabytes"] or slowest >= LIMITS["resume"])


if __name__ == "__main__":
    main()
