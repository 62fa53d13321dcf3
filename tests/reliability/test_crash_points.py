"""The controller is killed before every system call that writes something, and put right as an operator would.

gpuchange's own command line, journal, engine, player and processes of plays; strace delivers SIGKILL to the engine's
process alone, its plays live on. What the hosts were told to do is read from their own ledgers.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from reliability import peers
from reliability.crash_client import Client, serving
from reliability.crash_plans import ALL, CARELESS, SCRIPTS
from reliability.figures import Effort, Figures, Row

ROW = Row(
    "A controller killed at any write, and again while it resumes: no step is lost, repeated or out of order",
    peer="DBOS and Terraform, killed right after a step's effect: 6 of 6 steps repeated",
    source="measured by tests/reliability/peers.py, which the full form runs too",
)
SERVERS = 2
SHORT_POINTS = 5  # of each script
REMEDY_POINTS = 25  # writes of a resume that finds nothing to do
Act = tuple[str, str, str]  # host, role, what
Job = dict[str, Any]


def _missing() -> str:
    absent = [tool for tool in ("strace", "unshare") if not shutil.which(tool)]
    if os.geteuid() != 0:
        absent.append("root")
    return f"needs {', '.join(absent)}: scripts/tools installs them" if absent else ""


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[bool, list[Client]]]:
    """Servers with the stand-in for ansible-runner, and one with the real one, each started when first asked for."""
    if why := _missing():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(why)
    with ExitStack() as stack:
        yield Servers(stack)


class Servers(dict[bool, list[Client]]):
    def __init__(self, stack: ExitStack) -> None:
        super().__init__()
        self._stack = stack

    def __missing__(self, real: bool) -> list[Client]:
        self[real] = [self._start(real) for _ in range(SERVERS)]
        return self[real]

    def _start(self, real: bool) -> Client:
        memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # thousands of changes, and no power is cut here
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(dir=memory))
        return self._stack.enter_context(serving(Path(folder), real=real))


def lost(calm: Sequence[Act], found: Sequence[Act]) -> list[Act]:
    return list((Counter(calm) - Counter(found)).elements())


def repeated(calm: Sequence[Act], found: Sequence[Act]) -> list[Act]:
    return list((Counter(found) - Counter(calm)).elements())


def out_of_order(calm: Sequence[Act], found: Sequence[Act]) -> list[Act]:
    """Per host, what stands where something else should; which host comes first is for the limits to say."""
    hosts = {act[0] for act in calm}
    pairs = [(a, b) for host in sorted(hosts) for a, b in zip(_of(calm, host), _of(found, host), strict=False)]
    return [b for a, b in pairs if a != b]


def _of(acts: Sequence[Act], host: str) -> list[Act]:
    return [act for act in acts if act[0] == host]


def most_out(acts: Sequence[Act]) -> int:
    """How many hosts were drained at once."""
    out: set[str] = set()
    most = 0
    for host, role, what in acts:
        if role == "drain_gpu_users":
            (out.add if what == "apply" else out.discard)(host)
        most = max(most, len(out))
    return most


def way_back(acts: Sequence[Act]) -> tuple[list[Act], list[Act]]:
    """(lost, repeated) of a change taken back wherever it stood: every drain has its release, nothing else twice."""
    lost, repeated = [], []
    for host in sorted({act[0] for act in acts}):
        drains = [act for act in _of(acts, host) if act[1] == "drain_gpu_users"]
        repeated += [b for a, b in itertools.pairwise(drains) if a[2] == b[2]]
        lost += [act for act in drains[-1:] if act[2] == "apply"]
        others = Counter(act for act in _of(acts, host) if act[1] != "drain_gpu_users")
        repeated += list((others - Counter(dict.fromkeys(others, 1))).elements())
    return lost, repeated


def faults(script: str, calm: Job, found: Job) -> dict[str, list[Any]]:
    """What is not as it was promised, by kind."""
    acts = [tuple(act) for act in found["ledger"]]
    limit = int(ALL[script].options.get("max_unavailable", "1"))
    wrong: dict[str, list[Any]] = {
        "overlapping": [act for act in acts if act[2] == "overlap"],
        "out_of_order": [f"{most_out(acts)} hosts out at once"] if most_out(acts) > limit else [],
        "left_behind": [*found["left"], *(f"owner marker of {host}" for host in found["markers"])],
        "otherwise_wrong": [found["said"]] if found["traceback"] else [],
    }
    if calm["markers"]:
        wrong["left_behind"] = found["left"]
    if ALL[script].free:
        wrong["lost"], wrong["repeated"] = way_back(acts)
        ends = {status for step, status in found["statuses"].items() if "drain/" in step} - {"pending", "undone"}
        wrong["otherwise_wrong"] += [f"exit {found['code']}"] * (found["code"] != 0) + sorted(ends)
        return wrong
    before = [tuple(act) for act in calm["ledger"]]
    wrong["lost"], wrong["repeated"] = lost(before, acts), repeated(before, acts)
    wrong["out_of_order"] += out_of_order(before, acts) if not wrong["lost"] and not wrong["repeated"] else []
    differs = [key for key in ("code", "statuses") if found[key] != calm[key]]
    wrong["otherwise_wrong"] += [f"{key}: {found[key]}, and it said {found['said']}" for key in differs]
    return wrong


def jobs(script: str, calm: Job, effort: Effort) -> list[Job]:
    """Every point of every stage (full), or a few of them."""
    draw = random.Random(f"{effort.seed} {script}")
    found = [job for stage, points in enumerate(calm["points"]) for job in _stage_jobs(script, stage, points, draw)]
    return found if effort.full else draw.sample(found, min(SHORT_POINTS, len(found)))


def _stage_jobs(script: str, stage: int, points: Sequence[Any], draw: random.Random) -> Iterator[Job]:
    """A second kill is drawn from as many points as the remedy has about: what the first kill left undone."""
    for number, at in enumerate(points):
        then = draw.choice(points[: max(len(points) - number, REMEDY_POINTS)]) if ALL[script].twice else None
        patient = draw.random() < 0.3
        yield {"what": "strike", "script": script, "stage": stage, "at": at, "patient": patient, "then": then}


def strike_all(clients: Sequence[Client], todo: Sequence[Job]) -> Iterator[tuple[Job, Job]]:
    """Each job with what came of it, from all servers at once."""
    free: SimpleQueue[Client] = SimpleQueue()
    for client in clients:
        free.put(client)

    def strike(job: Job) -> tuple[Job, Job]:
        client = free.get()
        try:
            return job, client.ask(**job)
        finally:
            free.put(client)

    with ThreadPoolExecutor(len(clients)) as pool:
        yield from pool.map(strike, todo)


@pytest.mark.parametrize("script", SCRIPTS)
def test_killed_at_every_write(
    script: str, servers: dict[bool, list[Client]], effort: Effort, figures: Figures
) -> None:
    if effort.full and script == "forward":
        figures.count(**peers.measured())
    clients = servers[ALL[script].real][: effort.of(full=SERVERS, short=1)]
    calm = clients[0].calm(script)
    figures.count(lost=0, repeated=0, out_of_order=0, overlapping=0, killed_again=0)
    for job, found in strike_all(clients, jobs(script, calm, effort)):
        if not found["hits"]:
            figures.count(not_reached=1)
            continue
        figures.tried += 1
        figures.count(killed_again=found["hits"] - 1)
        for kind, what in faults(script, calm, found).items():
            figures.count(**{kind: len(what)})
            figures.broken += [f"{script}, {job}: {kind}: {fault}" for fault in what]


def test_this_test_can_fail(servers: dict[bool, list[Client]]) -> None:
    """Killed while a play runs and resumed without a look, the play is repeated."""
    client = servers[False][0]
    calm = client.calm(CARELESS)
    job = {"what": "strike", "script": CARELESS, "stage": 0, "patient": True, "then": None}
    middle = (client.ask(**job, at=at) for at in calm["points"][0][100:])
    assert any(faults(CARELESS, calm, found)["repeated"] for found in itertools.islice(middle, 30))


def test_the_ledgers_are_read_right() -> None:
    drain, release = ("h1", "drain_gpu_users", "apply"), ("h1", "drain_gpu_users", "undo")
    verify, other = ("h1", "verify_host", "apply"), ("h2", "drain_gpu_users", "apply")
    calm = [drain, verify, release]
    assert lost(calm, [drain, release]) == [verify] and repeated(calm, [drain, drain, verify, release]) == [drain]
    assert out_of_order(calm, [verify, drain, release]) == [verify, drain] and out_of_order(calm, calm) == []
    assert most_out([drain, other]) == 2 and most_out([drain, release, other]) == 1
    assert way_back([drain]) == ([drain], []) and way_back([drain, drain, release]) == ([], [drain])
