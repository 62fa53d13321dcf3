"""Keeps every card of a host busy at once for a bounded time, and notes what happens meanwhile.

Each card is loaded by a child process of its own. The parent never calls the driver: it counts each child's progress,
asks nvidia-smi beside it, and ends in time whatever a child, a driver or nvidia-smi does. Python 3.8.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import os
import re
import select
import signal
import threading
import time
from typing import Any, Callable, Dict, List

from ansible.module_utils import gpuchange_kernel_log as kernel_log
from ansible.module_utils import gpuchange_torch as torch
from ansible.module_utils.gpuchange_bench import Fma
from ansible.module_utils.gpuchange_child import conclude, in_child, parse, start
from ansible.module_utils.gpuchange_cuda import ENVIRONMENT, all_cards, mismatches
from ansible.module_utils.gpuchange_cuda_driver import CudaError, Driver, Session
from ansible.module_utils.gpuchange_look import read_text, run

CHUNK_BYTES, AREA_BYTES = 16 << 20, 128 << 20
BURST_S = 0.5
LIST_DEADLINE_S = 30.0
SMI_DEADLINE_S = 10.0
SAMPLES = 40

Step = Callable[[str], None]

# --- the load of one card, in its child ----------------------------------------------------------------------


def load_card(driver: Driver, index: int, seconds: float, step: Step) -> dict[str, Any]:
    """Copies and computes until the time is up or a result is wrong: {ok, why, rounds, wrong: {copy, fma}}."""
    until = time.monotonic() + seconds
    with Session(driver, index) as session:
        fma = Fma(session, session.module())
        rounds = fma.calibrated()
        data, area = os.urandom(CHUNK_BYTES), session.allocate(AREA_BYTES)
        wanted = array.array("f", range(4 * rounds - 4, 4 * rounds - 4 + fma.threads)).tobytes()
        done, wrong = 0, {"copy": 0, "fma": 0}
        while not done or (time.monotonic() < until and not any(wrong.values())):  # one round at least, on any machine
            step("round %d" % done)
            wrong["copy"] = copied_wrong(session, area, done, data)
            burst(session, fma, rounds, min(until, time.monotonic() + BURST_S))
            wrong["fma"] = mismatches(session.download(fma.out, len(wanted)), wanted)
            done += 1
    said = ["%s: %d of the results are wrong" % (name, count) for name, count in wrong.items() if count]
    return {"ok": not said, "why": "; ".join(said), "rounds": done, "wrong": wrong}


def copied_wrong(session: Session, area: ctypes.c_uint64, done: int, data: bytes) -> int:
    """Into the next part of the area, on to the part after it, and back: how many words came back wrong."""
    parts = AREA_BYTES // CHUNK_BYTES
    first, second = (ctypes.c_uint64(area.value + ((done + n) % parts) * CHUNK_BYTES) for n in (0, 1))
    size = ctypes.c_size_t(len(data))
    session.driver.call("cuMemcpyHtoD_v2", first, ctypes.c_char_p(data), size)
    session.driver.call("cuMemcpyDtoD_v2", second, first, size)
    return mismatches(session.download(second, len(data)), data)


def burst(session: Session, fma: Fma, rounds: int, until: float) -> None:
    while True:
        fma.launch(rounds)
        session.driver.call("cuCtxSynchronize")
        if time.monotonic() >= until:
            return


def _load(index: int, seconds: float) -> Callable[[Step], dict[str, Any]]:
    def work(step: Step) -> dict[str, Any]:
        step("cuInit")
        try:
            driver = Driver()
            driver.call("cuInit", ctypes.c_uint(0))
            return load_card(driver, index, seconds, step)
        except CudaError as error:
            return {"ok": False, "why": str(error), "error": error.fields}

    return work


# --- the parent: progress and looks --------------------------------------------------------------------------


class Load:
    """One card's child process: what it has said, and when it last moved."""

    def __init__(self, card: dict[str, Any], pid: int, reader: int) -> None:
        self.card, self.pid, self.reader = card, pid, reader
        self.data, self.moved, self.open, self.in_time = b"", time.monotonic(), True, True

    def take(self) -> None:
        block = os.read(self.reader, 65536)
        self.data, self.moved = self.data + block, time.monotonic()
        self.open = bool(block)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def give_up(self) -> None:
        self.open = self.in_time = False

    def ended(self, hang_s: float) -> dict[str, Any]:
        os.close(self.reader)
        said = conclude(self.pid, [line for line in parse(self.data) if isinstance(line, dict)], self.in_time, hang_s)
        if not self.in_time:
            stuck = ", and cannot even be killed" if said.get("hung") else ""
            said = dict(said, stalled=True, why="no progress for %g s at %s%s" % (hang_s, said.get("step"), stuck))
        return dict({"ok": False, "why": ""}, **self.card, **said)


def follow(loads: List[Load], hang_s: float, told: Callable[[], None]) -> None:
    """Until every child has ended, or has made no progress for `hang_s` seconds."""
    while True:
        working = [load for load in loads if load.open]
        if not working:
            return
        ready = select.select([load.reader for load in working], [], [], 0.5)[0]
        for load in working:
            if load.reader in ready:
                load.take()
            elif time.monotonic() - load.moved > hang_s:
                load.give_up()
        told()


class Looks(threading.Thread):
    """nvidia-smi's answers while the cards work: {at, rc, out, hung}; ever fewer a minute, so that they stay few."""

    def __init__(self, query: List[str], interval_s: float = 1.0) -> None:
        super().__init__(daemon=True)
        self.argv = ["nvidia-smi", "--query-gpu=" + ",".join(query), "--format=csv,noheader,nounits"]
        self.interval_s, self.over, self.began = interval_s, threading.Event(), time.monotonic()
        self.found: List[Dict[str, Any]] = []

    def look(self) -> None:
        at, said = time.monotonic() - self.began, run(self.argv, SMI_DEADLINE_S)
        self.found.append({"at": round(at, 1), **{key: said[key] for key in ("rc", "out", "err", "hung")}})
        if len(self.found) > SAMPLES:
            self.found, self.interval_s = self.found[::2], 2 * self.interval_s

    def run(self) -> None:
        while not self.over.is_set():
            self.look()
            self.over.wait(self.interval_s)

    def end(self) -> List[Dict[str, Any]]:
        self.over.set()
        self.join(SMI_DEADLINE_S + 2.0)
        return list(self.found)


def memory_kills() -> int:
    """How often this kernel has killed a process for want of memory since it started."""
    found = re.search(r"^oom_kill (\d+)$", read_text("/proc/vmstat"), re.M)
    return int(found.group(1)) if found else 0


# --- all of it -----------------------------------------------------------------------------------------------


def stress_test(job: Dict[str, Any], note: Step) -> dict[str, Any]:
    """job: {seconds, hang_s, since: epoch, query: nvidia-smi fields, python: interpreter that may have torch or ""}.

    {ok, why, seconds, load, note, cards: [{index, uuid, pci, name, ok, why, rounds, stalled?}], samples,
    log: since the change began, log_load: since the load began, memory_kills, nccl?}
    """
    note("stress: looking for the cards")
    listed = dict({"ok": False, "cards": []}, **in_child(_list, LIST_DEADLINE_S, ENVIRONMENT))
    if not listed["ok"]:
        return dict(listed, seconds=0, samples=[])
    library = torch.look(str(job.get("python") or ""))
    began, kills, looks = time.time(), memory_kills(), Looks(list(job["query"]))
    looks.look()
    loads = [begin(card, float(job["seconds"]), library) for card in listed["cards"]]
    looks.start()
    try:
        follow(loads, float(job["hang_s"]), progress(note, float(job["seconds"])))
    except BaseException:  # told to end: what we started ends with us
        for load in loads:
            load.kill()
        raise
    samples, cards = looks.end(), [load.ended(float(job["hang_s"])) for load in loads]
    failed = ["card %d (%s at %s): %s" % (c["index"], c["uuid"], c["pci"], c["why"]) for c in cards if not c["ok"]]
    return {
        **{"ok": not failed, "why": "; ".join(failed), "seconds": job["seconds"], "cards": cards, "samples": samples},
        **{"load": library["load"], "note": library["why"]},
        "log": kernel_log.since(float(job.get("since") or began)),
        "log_load": kernel_log.since(began),
        "memory_kills": memory_kills() - kills,
        "nccl": torch.nccl(library, len(cards), note) if not failed else None,
    }


def _list(step: Step) -> dict[str, Any]:
    return all_cards(step, lambda: lambda driver, index: {"ok": True, "why": ""})


def begin(card: Dict[str, Any], seconds: float, library: Dict[str, Any]) -> Load:
    who = {key: card[key] for key in ("index", "uuid", "pci", "name")}
    if library["load"] != "built-in":
        return Load(who, *torch.start(library, int(card["index"]), seconds))
    return Load(who, *start(_load(int(card["index"]), seconds), ENVIRONMENT))


def progress(note: Step, seconds: float) -> Callable[[], None]:
    """Tells at most once a second."""
    began, told = time.monotonic(), [0.0]

    def tell() -> None:
        now = time.monotonic()
        if now - told[0] >= 1.0:
            told[0] = now
            note("stress: %d of %d s" % (now - began, seconds))

    return tell
