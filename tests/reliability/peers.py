"""How others take the same kill: a job of six steps, killed right after the effect of each, then started again.

python tests/reliability/peers.py      prints for each peer that could be had: steps repeated, of 6
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable
from pathlib import Path

STEPS = 6
PATIENCE_S = 300

DBOS_JOB = """
import os, signal, sys
from dbos import DBOS, SetWorkflowID

folder, kill_at = sys.argv[1], int(sys.argv[2])
DBOS(config={"name": "six", "system_database_url": f"sqlite:///{folder}/dbos.sqlite"})

@DBOS.step()
def step(number):
    with open(f"{folder}/ledger", "a") as ledger:
        ledger.write(f"{number}\\n")
    if number == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)

@DBOS.workflow()
def job():
    for number in range(1, STEPS + 1):
        step(number)

DBOS.launch()
if kill_at:
    with SetWorkflowID("job"):
        job()
DBOS.retrieve_workflow("job").get_result()
DBOS.destroy()
""".replace("STEPS", str(STEPS))

TERRAFORM_STEP = """
resource "terraform_data" "step%(number)d" {
  depends_on = [%(before)s]
  provisioner "local-exec" {
    command = "echo %(number)d >> ledger; test %(number)d != $(cat kill_at) || kill -9 $PPID"
  }
}
"""


def _run(folder: Path, *command: str) -> int:
    done = subprocess.run(command, cwd=folder, capture_output=True, timeout=PATIENCE_S)
    return done.returncode


def _repeated(folder: Path) -> int:
    """Steps that stand twice in the ledger. Raises ValueError when one is missing: then the job was not finished."""
    done = (folder / "ledger").read_text().split()
    if set(done) != {str(number) for number in range(1, STEPS + 1)}:
        raise ValueError(f"the job did not end: {done}")
    return len(done) - STEPS


def dbos(folder: Path) -> int | None:
    """Steps repeated over all kills; None where DBOS cannot be installed."""
    venv.create(folder / "venv", with_pip=True)
    python = str(folder / "venv" / "bin" / "python")
    if _run(folder, python, "-m", "pip", "install", "-q", "dbos"):
        return None
    (folder / "job.py").write_text(DBOS_JOB)
    return sum(_dbos_killed(folder / str(at), python, at) for at in range(1, STEPS + 1))


def _dbos_killed(folder: Path, python: str, at: int) -> int:
    folder.mkdir()
    for kill_at in (at, 0):
        _run(folder, python, str(folder.parent / "job.py"), str(folder), str(kill_at))
    return _repeated(folder)


def terraform(folder: Path) -> int | None:
    """Steps repeated over all kills; None where there is no terraform."""
    program = shutil.which("terraform")
    if program is None:
        return None
    return sum(_terraform_killed(folder / str(at), program, at) for at in range(1, STEPS + 1))


def _terraform_killed(folder: Path, program: str, at: int) -> int:
    folder.mkdir()
    befores = ["", *(f"terraform_data.step{number}" for number in range(1, STEPS))]
    steps = (TERRAFORM_STEP % {"number": number, "before": before} for number, before in enumerate(befores, 1))
    (folder / "main.tf").write_text("".join(steps))
    _run(folder, program, "init")
    for kill_at in (at, 0):
        (folder / "kill_at").write_text(str(kill_at))
        _run(folder, program, "apply", "-auto-approve")
    return _repeated(folder)


PEERS: dict[str, Callable[[Path], int | None]] = {"dbos": dbos, "terraform": terraform}


def measured() -> dict[str, int]:
    """`<peer>_repeated` → steps repeated of STEPS, for each peer that could be had."""
    found = {}
    for name, measure in PEERS.items():
        with tempfile.TemporaryDirectory(prefix="peer-") as folder:
            repeated = measure(Path(folder))
        if repeated is not None:
            found[f"{name}_repeated"] = repeated
    return found


if __name__ == "__main__":
    for figure, number in measured().items():
        sys.stdout.write(f"{figure}: {number} of {STEPS}\n")
