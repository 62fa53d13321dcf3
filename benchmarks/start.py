"""How long the command line takes to start: `gpuchange --help` and `status`, against `ansible --version`.

    python benchmarks/start.py [rounds]

Prints medians and ratios, and which heavy packages each command has imported (there should be none).
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HEAVY = ("ansible", "ansible_runner", "paramiko", "pydantic", "rich", "yaml")
BIN = Path(sys.executable).parent
MODULES = "import sys; from gpuchange.cli import main; main(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"


def seconds(command: list[str], env: dict[str, str], rounds: int) -> float:
    """Median wall seconds of `command`; the first run (cold caches) is not counted."""
    taken = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        subprocess.run(command, env=env, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def imported(verb: str, env: dict[str, str]) -> list[str]:
    """The heavy packages that `gpuchange VERB` imports."""
    done = subprocess.run([sys.executable, "-c", MODULES, verb], env=env, capture_output=True, text=True, check=False)
    loaded = {name.partition(".")[0] for name in done.stderr.split()}
    return [name for name in HEAVY if name in loaded]


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    with tempfile.TemporaryDirectory() as empty:
        env = {**os.environ, "GPUCHANGE_STATE": os.environ.get("GPUCHANGE_STATE", empty)}
        base = seconds([str(BIN / "ansible"), "--version"], env, rounds)
        print(f"{'ansible --version':22} {base:6.3f} s   1.00")
        for verb in ("--help", "status"):
            taken = seconds([sys.executable, "-m", "gpuchange", verb], env, rounds)
            heavy = ", ".join(imported(verb, env)) or "none"
            print(f"{'gpuchange ' + verb:22} {taken:6.3f} s   {taken / base:4.2f}   heavy imports: {heavy}")


if __name__ == "__main__":
    main()
