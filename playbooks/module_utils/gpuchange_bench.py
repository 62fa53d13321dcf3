"""How fast are the cards? Copies, arithmetic, launches and card-to-card, through the driver API alone.

Every number is a median of repeats after warm-up, on the card's own clock. Python 3.8, standard library only.
"""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from typing import Any, Callable, Dict, List

from ansible.module_utils.gpuchange_cuda import DEADLINE_S, all_cards, answer
from ansible.module_utils.gpuchange_cuda_driver import Driver, Session
from ansible.module_utils.gpuchange_look import run

COPY_BYTES = 32 << 20
WITHIN_BYTES = 64 << 20
WARM_UPS, REPEATS = 2, 7
LAUNCHES = 200
MULTIPROCESSORS = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
FMA_THREADS = 128
FMAS_A_ROUND = 32
MOST_ROUNDS = 1 << 20  # beyond it a chain would leave the whole numbers that a float holds
LONG_ENOUGH_MS, WAITED_ENOUGH_S = 5.0, 0.02
LINK_FIELDS = ("uuid", "pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current", "pcie.link.width.max")
LINK_DEADLINE_S = 10.0

Metric = Dict[str, Any]


def sample(session: Session, work: Callable[[], None], times: int) -> float:
    """Milliseconds on the card's own clock for `times` repetitions."""
    start, end, elapsed = session.event(), session.event(), ctypes.c_float()
    session.driver.call("cuEventRecord", start, None)
    for _ in range(times):
        work()
    session.driver.call("cuEventRecord", end, None)
    session.driver.call("cuEventSynchronize", end)
    session.driver.call("cuEventElapsedTime", ctypes.byref(elapsed), start, end)
    return elapsed.value


def summary(values: List[float]) -> Metric:
    """Median of the samples; `spread` is (largest - smallest) / median."""
    median = statistics.median(values)
    spread = (max(values) - min(values)) / median if median > 0 else 0.0
    return {"median": round(median, 4), "spread": round(spread, 4), "samples": len(values)}


def measure(one: Callable[[], float]) -> Metric:
    for _ in range(WARM_UPS):
        one()
    return summary([one() for _ in range(REPEATS)])


def copy_rate(session: Session, copy: Callable[[], None], size: int) -> Metric:
    """GB/s: 10^9 bytes copied in a second."""
    return measure(lambda: size / sample(session, copy, 1) / 1e6)


# --- arithmetic ----------------------------------------------------------------------------------------------


class Fma:
    """The arithmetic kernel on one card: one warp for each scheduler, whose eight chains hide the latency of a step."""

    def __init__(self, session: Session, module: ctypes.c_void_p) -> None:
        self.session = session
        many = session.driver.number("cuDeviceGetAttribute", ctypes.c_int(MULTIPROCESSORS), session.device)
        self.blocks = max(1, many)
        self.threads = self.blocks * FMA_THREADS
        self.function = session.function(module, b"gpuchange_fma")
        self.out = session.allocate(4 * self.threads)

    def launch(self, rounds: int) -> None:
        one = ctypes.c_float(1.0)
        self.session.launch(self.function, self.blocks, FMA_THREADS, self.out, one, one, ctypes.c_uint32(rounds))

    def milliseconds(self, rounds: int) -> float:
        return sample(self.session, lambda: self.launch(rounds), 1)

    def calibrated(self) -> int:
        """Rounds that keep the card busy for a while; fewer where the wait itself is long."""
        self.launch(1)
        self.session.driver.call("cuCtxSynchronize")
        rounds = 1
        while rounds < MOST_ROUNDS // 4:
            began = time.monotonic()
            if self.milliseconds(rounds) >= LONG_ENOUGH_MS or time.monotonic() - began >= WAITED_ENOUGH_S:
                break
            rounds *= 4
        return rounds

    def rate(self, rounds: int) -> float:
        """GFLOP/s, two operations a multiply-add: twice the work's time less that of once, so no start-up counts."""
        extra = self.milliseconds(2 * rounds) - self.milliseconds(rounds)
        return 2.0 * FMAS_A_ROUND * rounds * self.threads / max(extra, 1e-9) / 1e6


# --- one card ------------------------------------------------------------------------------------------------


def bench_card(driver: Driver, index: int, count: int = 1) -> dict[str, Any]:
    """h2d, d2h, d2d, peer in GB/s (pinned host memory), fp32 in GFLOP/s, launch in µs; the link under load."""
    with Session(driver, index) as session:
        module = session.module()
        metrics = copies(session)
        link = link_under_load(session)
        fma = Fma(session, module)
        rounds = fma.calibrated()
        metrics["fp32"] = measure(lambda: fma.rate(rounds))
        nothing = session.function(module, b"gpuchange_nothing")
        launch = lambda: session.launch(nothing, 1, 32)  # noqa: E731
        metrics["launch"] = measure(lambda: sample(session, launch, LAUNCHES) * 1e3 / LAUNCHES)
        if count > 1:
            metrics["peer"] = peer_rate(session, index, (index + 1) % count)
    return {"ok": True, "why": "", "metrics": metrics, "link": link}


def copies(session: Session) -> dict[str, Metric]:
    call, host = session.driver.call, session.pinned(COPY_BYTES)
    first, second = session.allocate(WITHIN_BYTES), session.allocate(WITHIN_BYTES)
    size, within = ctypes.c_size_t(COPY_BYTES), ctypes.c_size_t(WITHIN_BYTES)
    ctypes.memset(host, 0x5A, COPY_BYTES)
    return {
        "h2d": copy_rate(session, lambda: call("cuMemcpyHtoDAsync_v2", first, host, size, None), COPY_BYTES),
        "d2h": copy_rate(session, lambda: call("cuMemcpyDtoHAsync_v2", host, first, size, None), COPY_BYTES),
        "d2d": copy_rate(session, lambda: call("cuMemcpyDtoDAsync_v2", second, first, within, None), WITHIN_BYTES),
    }


def peer_rate(session: Session, index: int, other: int) -> Metric:
    """To the next card, directly if the hardware can, else through the host: as a program would copy."""
    driver, theirs = session.driver, session.peer(other)
    ours, there = ctypes.c_void_p(), ctypes.c_uint64()
    size = ctypes.c_size_t(COPY_BYTES)
    driver.call("cuCtxGetCurrent", ctypes.byref(ours))
    here = session.allocate(COPY_BYTES)
    driver.call("cuCtxSetCurrent", theirs)
    try:
        driver.call("cuMemAlloc_v2", ctypes.byref(there), size)
    finally:
        driver.call("cuCtxSetCurrent", ours)
    session.later("cuMemFree_v2", there)
    return copy_rate(
        session, lambda: driver.call("cuMemcpyPeerAsync", there, theirs, here, ours, size, None), COPY_BYTES
    )


def link_under_load(session: Session) -> dict[str, Any]:
    """What nvidia-smi says of the links while this card copies: idle links rest at a low speed and prove nothing."""
    said: dict[str, Any] = {}
    argv = ["nvidia-smi", "--query-gpu=" + ",".join(LINK_FIELDS), "--format=csv,noheader,nounits"]
    asker = threading.Thread(target=lambda: said.update(run(argv, LINK_DEADLINE_S)), daemon=True)
    host, device, size = session.pinned(COPY_BYTES), session.allocate(COPY_BYTES), ctypes.c_size_t(COPY_BYTES)
    asker.start()
    while asker.is_alive():
        session.driver.call("cuMemcpyHtoD_v2", device, host, size)
    return {key: said.get(key) for key in ("rc", "out", "hung")}


# --- all cards -----------------------------------------------------------------------------------------------


def _bench(step: Callable[[str], None]) -> dict[str, Any]:
    def prepare() -> Callable[[Driver, int], dict[str, Any]]:
        count = Driver().number("cuDeviceGetCount")
        return lambda driver, index: bench_card(driver, index, count)

    return all_cards(step, prepare)


def bench_test(deadline_s: float = DEADLINE_S) -> dict[str, Any]:
    """Like function_test, but each card has `metrics` {name: {median, spread, samples}} and `link`; see bench_card."""
    return answer(_bench, deadline_s)
