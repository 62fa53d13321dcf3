"""What one play of gpuchange costs beside a hand-written `ansible-playbook` that calls the same module on that host.

    python benchmarks/overhead.py --lab NAME [--host gpu1] [--rounds 7]

Both call the facts module of record on one lab host, in turns, connections warm. Prints wall and controller CPU seconds
(median; the play's own processes and their children) and the ratio. Ends with 1 when a play costs more than 2 s of wall
or 1.5 s of CPU beyond the hand-written one.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import selectors
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpuchange import content
from gpuchange.lab import Lab
from gpuchange.player import Play, Request, end_orphans, environment
from gpuchange.reports import Reported

MOST_WALL_S, MOST_CPU_S = 2.0, 1.5
OWNER = {"change": "benchmark", "controller": "benchmark", "fence": 1, "reason": "", "ticket": ""}
STEP = {"phase": "record", "provider": "host", "direction": "do"}
ARGS: dict[str, Any] = {"paths": ["/srv/models"], "services": []}
BY_HAND = """---
- hosts: all
  gather_facts: false
  tasks:
    - name: Look at the host
      gpuchange_facts:
        mode: probe
        owner: {owner}
        args: {args}
        step: {step}
"""


def by_gpuchange(lab: Lab, host: str, logs: Path) -> None:
    attempt = f"benchmark-{os.getpid()}/{time.monotonic_ns()}"
    request = Request(
        attempt=attempt,
        playbook=content.playbooks() / content.PLAYBOOK,
        role="record_host",
        tasks="probe",
        hosts=(host,),
        inventory=(str(lab.inventory),),
        host_args={host: ARGS},
        shared={"gpuchange_owner": OWNER, "gpuchange_step": STEP},
    )
    play = Play(request, logs)
    found = []
    with selectors.DefaultSelector() as selector:
        selector.register(play, selectors.EVENT_READ)
        while not play.ended:
            selector.select(60)
            found += list(play.evidence())
    if not isinstance(found[0], Reported):
        raise SystemExit(f"the play did not report: {found}")


def by_hand(lab: Lab, host: str, playbook: Path) -> None:
    command = ["ansible-playbook", "-i", str(lab.inventory), "-l", host, str(playbook)]
    done = subprocess.run(command, env=environment("benchmark/0"), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)


def measured(act: Callable[[], None]) -> tuple[float, float]:
    """(wall, CPU) seconds of one call, the CPU time of all its ended children."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    act()
    wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lab", required=True)
    parser.add_argument("--host", default="gpu1")
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    lab = Lab.load(asked.lab)
    with tempfile.TemporaryDirectory() as scratch:
        written = {key: json.dumps(value) for key, value in (("owner", OWNER), ("args", ARGS), ("step", STEP))}
        (Path(scratch) / "library").symlink_to(content.playbooks() / "library")
        (Path(scratch) / "module_utils").symlink_to(content.playbooks() / "module_utils")
        playbook = Path(scratch) / "by-hand.yml"
        playbook.write_text(BY_HAND.format(**written))
        ours, theirs = [], []
        by_hand(lab, asked.host, playbook)  # warms connection and caches for both
        for _ in range(asked.rounds):
            theirs.append(measured(lambda: by_hand(lab, asked.host, playbook)))
            ours.append(measured(lambda: by_gpuchange(lab, asked.host, Path(scratch) / "logs")))
    end_orphans(f"benchmark-{os.getpid()}")
    end_orphans("benchmark/0")
    return shown(ours, theirs)


def shown(ours: list[tuple[float, float]], theirs: list[tuple[float, float]]) -> int:
    (wall, cpu), (hand_wall, hand_cpu) = (
        tuple(statistics.median(row[column] for row in rows) for column in (0, 1)) for rows in (ours, theirs)
    )
    print(f"{'':<18}{'wall s':>8}{'CPU s':>8}")
    print(f"{'gpuchange play':<18}{wall:>8.2f}{cpu:>8.2f}")
    print(f"{'ansible-playbook':<18}{hand_wall:>8.2f}{hand_cpu:>8.2f}")
    print(f"{'ratio':<18}{wall / hand_wall:>8.2f}{cpu / hand_cpu:>8.2f}")
    print(f"beyond the hand-written one: {wall - hand_wall:.2f} s wall, {cpu - hand_cpu:.2f} s CPU")
    return int(wall - hand_wall > MOST_WALL_S or cpu - hand_cpu > MOST_CPU_S)


if __name__ == "__main__":
    sys.exit(main())
