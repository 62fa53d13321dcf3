"""Load and NCCL through the host's own PyTorch, where it has one that sees the cards. Python 3.8, standard library.

Nothing here imports torch: the texts below are run by the interpreter that has it, as processes of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any, Callable, Dict, Sequence, Tuple

from ansible.module_utils.gpuchange_look import ENVIRONMENT, run

LOOK_DEADLINE_S = 60.0
NCCL_DEADLINE_S = 120.0

LOOK = """
import json, torch
seen = torch.cuda.is_available()
print(json.dumps({"version": torch.__version__, "cards": torch.cuda.device_count() if seen else 0}))
"""

LOAD = """
import json, sys, time
import torch
device, seconds, size = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])

def say(**message):
    print(json.dumps(message), flush=True)

say(step="making matrices")
whole = torch.randint(-8, 9, (size, size), device=device).to(torch.float32)
wanted = whole.cpu().double().sum().item() * 1.0
ones = torch.ones(size, 1, device=device)
first, until, done, wrong = (whole @ whole), time.monotonic() + seconds, 0, 0
while time.monotonic() < until and not wrong:
    say(step="round %d" % done)
    again = whole @ whole  # whole numbers, small enough for every sum to be exact
    wrong = int((again != first).sum().item()) + int((whole @ ones).double().sum().item() != wanted)
    done += 1
why = "matmul: %d of the results are wrong" % wrong if wrong else ""
say(result={"ok": not wrong, "why": why, "rounds": done, "wrong": {"matmul": wrong}})
"""

COLLECTIVE = """
import json, os, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp
backend, world, port = sys.argv[1], int(sys.argv[2]), sys.argv[3]

def one(rank, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group(backend, rank=rank, world_size=world)
    device = "cuda:%d" % rank if backend == "nccl" else "cpu"
    values = torch.full((1 << 20,), float(rank + 1), device=device)
    dist.all_reduce(values)
    results[rank] = int((values != world * (world + 1) / 2).sum().item())
    dist.destroy_process_group()

if __name__ == "__main__":
    results = mp.Manager().dict()
    mp.start_processes(one, args=(results,), nprocs=world, start_method="fork")  # no file to spawn from
    print(json.dumps({"wrong": [results.get(rank, -1) for rank in range(world)]}))
"""


def ask(python: str, deadline_s: float = LOOK_DEADLINE_S, env: Sequence[str] = ()) -> Dict[str, Any]:
    """{version, cards, path, why}: what this interpreter's PyTorch says of itself; `why`: there is none to be had.

    `env`: NAME=VALUE, beside what every command gets.
    """
    said = run([*(["env", *env] if env else []), python or "python3", "-c", LOOK], deadline_s)
    nothing = {"version": "", "cards": 0, "path": str(said["path"])}
    if said["hung"]:
        return dict(nothing, why="no answer within %g s" % deadline_s)
    if said["rc"] != 0:
        return dict(nothing, why=(str(said["err"]).strip().splitlines() or ["no answer"])[-1][:200])
    try:
        found = json.loads(str(said["out"]).strip().splitlines()[-1])
        return dict(nothing, version=str(found["version"]), cards=int(found["cards"]), why="")
    except (ValueError, KeyError, TypeError, IndexError):
        return dict(nothing, why="its answer cannot be read")


def look(python: str) -> Dict[str, Any]:
    """{load: "torch VERSION" | "built-in", python, why}: `why` says why PyTorch does not carry the load."""
    found = ask(python)
    own = {"load": "built-in", "python": ""}
    if found["why"]:
        return dict(own, why="PyTorch is not used: %s" % found["why"])
    if not found["cards"]:
        return dict(own, why="PyTorch %s is not used: it sees no card" % found["version"])
    return {"load": "torch %s" % found["version"], "python": found["path"], "why": ""}


def start(library: Dict[str, Any], index: int, seconds: float, device: str = "", size: int = 4096) -> Tuple[int, int]:
    """(pid, reader) of a process that loads one card and says what it does as `gpuchange_child.start`'s children do."""
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [library["python"], "-c", LOAD, device or "cuda:%d" % index, str(seconds), str(size)],
        stdin=subprocess.DEVNULL,
        stdout=writer,
        stderr=subprocess.DEVNULL,
        env=dict(ENVIRONMENT, CUDA_DEVICE_ORDER="PCI_BUS_ID"),
        start_new_session=True,
    )
    os.close(writer)
    process.returncode = 0  # it is waited for by its pid, with a deadline, not by this object
    return process.pid, reader


def nccl(library: Dict[str, Any], cards: int, note: Callable[[str], None]) -> Any:
    """An all-reduce over the host's cards through NCCL; None where there is no PyTorch or nothing to talk to."""
    if library["load"] == "built-in" or cards < 2:
        return None
    note("stress: NCCL all-reduce over %d cards" % cards)
    return collective(library["python"], "nccl", cards)


def collective(python: str, backend: str, world: int, port: int = 29517) -> Dict[str, Any]:
    """{ok, why}: whether every rank has the sum."""
    said = run([python, "-c", COLLECTIVE, backend, str(world), str(port)], NCCL_DEADLINE_S)
    if said["rc"] != 0:
        last = (str(said["err"]).strip().splitlines() or ["no answer"])[-1]
        return {"ok": False, "why": "no end within %g s" % NCCL_DEADLINE_S if said["hung"] else last[:300]}
    try:
        wrong = list(json.loads(str(said["out"]).strip().splitlines()[-1])["wrong"])
    except (ValueError, KeyError, TypeError, IndexError):
        return {"ok": False, "why": "its answer cannot be read"}
    bad = ["rank %d: %s wrong sums" % (rank, count) for rank, count in enumerate(wrong) if count]
    return {"ok": not bad and len(wrong) == world, "why": "; ".join(bad)}
