"""Tests NVIDIA cards through the CUDA driver API (libcuda.so.1, by ctypes). Needs no toolkit.

`function_test` runs in a child process with a deadline: a driver that hangs, even in the kernel, costs the child,
not the play. Python 3.8, standard library only.
"""

from __future__ import annotations

import array
import ctypes
import os
from typing import Any, Callable, Dict

from ansible.module_utils.gpuchange_child import in_child
from ansible.module_utils.gpuchange_cuda_driver import CudaError, Driver, Session, identity

DEADLINE_S = 35.0
COPY_BYTES = 64 << 20
KERNEL_ELEMENTS = 1 << 18
THREADS = 256

ENVIRONMENT = {
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the order nvidia-smi uses
    "CUDA_CACHE_DISABLE": "1",  # a test leaves no compiled kernels in a home directory
}

# --- function: does each card do what it is asked to? ----------------------------------------------------------


def mismatches(got: bytes, wanted: bytes) -> int:
    """How many 32-bit words differ."""
    if got == wanted:
        return 0
    return sum(a != b for a, b in zip(memoryview(got).cast("I"), memoryview(wanted).cast("I")))


def copy_check(session: Session, data: bytes) -> dict[str, Any]:
    """Allocate, copy in, copy within the card, copy out; all of it random, so a repeated or shifted block shows."""
    first, second = session.upload(data), session.allocate(len(data))
    session.driver.call("cuMemcpyDtoD_v2", second, first, ctypes.c_size_t(len(data)))
    return {"bytes": len(data), "mismatches": mismatches(session.download(second, len(data)), data)}


def problems(data: bytes) -> dict[str, tuple[Any, ...]]:
    """What the kernels are asked and what the CPU says, the same for all cards: name -> (x, y, factor, wanted).

    Words: every bit pattern, from `data`. Floats: numbers small enough for every step to be exact.
    """
    size, factor = KERNEL_ELEMENTS * 4, 2654435761
    x, y = data[:size], data[size : 2 * size]
    pairs = enumerate(zip(memoryview(x).cast("I"), memoryview(y).cast("I")))
    words = array.array("I", [((factor * a + b) & 0xFFFFFFFF) ^ i for i, (a, b) in pairs])
    fx = array.array("f", [i % 4096 for i in range(KERNEL_ELEMENTS)])
    fy = array.array("f", [(7 * i) % 8191 for i in range(KERNEL_ELEMENTS)])
    floats = array.array("f", [3.0 * a + b for a, b in zip(fx, fy)])
    return {
        "words": (x, y, ctypes.c_uint32(factor), words.tobytes()),
        "floats": (fx.tobytes(), fy.tobytes(), ctypes.c_float(3.0), floats.tobytes()),
    }


def kernel_check(session: Session, function: Any, x: bytes, y: bytes, factor: Any, wanted: bytes) -> dict[str, Any]:
    on_x, on_y = session.upload(x), session.upload(y)
    blocks = KERNEL_ELEMENTS // THREADS
    session.launch(function, blocks, THREADS, on_x, on_y, factor, ctypes.c_uint32(KERNEL_ELEMENTS))
    session.driver.call("cuCtxSynchronize")
    return {"elements": KERNEL_ELEMENTS, "mismatches": mismatches(session.download(on_y, len(y)), wanted)}


def check_card(driver: Driver, index: int, data: bytes, asked: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    checks: dict[str, Any] = {}
    with Session(driver, index) as session:
        checks["copy"] = copy_check(session, data)
        module = session.module()
        for name, (x, y, factor, wanted) in asked.items():
            function = session.function(module, b"gpuchange_" + name.encode("ascii"))
            checks[name] = kernel_check(session, function, x, y, factor, wanted)
    wrong = [
        "%s: %d of the results are wrong" % (name, c["mismatches"]) for name, c in checks.items() if c["mismatches"]
    ]
    return {"ok": not wrong, "why": "; ".join(wrong), "checks": checks}


# --- all cards, in a child ---------------------------------------------------------------------------------------


Test = Callable[[Driver, int], Dict[str, Any]]


def all_cards(step: Callable[[str], None], prepare: Callable[[], Test]) -> dict[str, Any]:
    """Every card's identity and result; one card's failure does not hide the others'.

    The driver is asked first: only when it answers is anything made ready for the cards.
    """
    result: dict[str, Any] = {"ok": False, "why": "", "count": 0, "cards": [], "driver_api": 0}
    try:
        step("cuInit")
        driver = Driver()
        driver.call("cuInit", ctypes.c_uint(0))
        result["driver_api"] = driver.number("cuDriverGetVersion")
        result["count"] = driver.number("cuDeviceGetCount")
    except CudaError as error:
        return dict(result, why=str(error), error=error.fields)
    step("making test data")
    test = prepare()
    for index in range(result["count"]):
        step("card %d" % index)
        result["cards"].append(one_card(driver, index, test))
    failed = ["card %d (%s): %s" % (c["index"], c["uuid"] or "?", c["why"]) for c in result["cards"] if not c["ok"]]
    why = "; ".join(failed) or ("" if result["count"] else "the driver sees no card")
    return dict(result, ok=not why, why=why)


def one_card(driver: Driver, index: int, test: Test) -> dict[str, Any]:
    card: dict[str, Any] = {"index": index, "uuid": "", "pci": "", "name": "", "memory_bytes": 0}
    try:
        card.update(identity(driver, index))
        card.update(test(driver, index))
    except CudaError as error:
        card.update(ok=False, why=str(error), error=error.fields)
    return card


def function_of_card() -> Test:
    data = os.urandom(COPY_BYTES)
    asked = problems(data)
    return lambda driver, index: check_card(driver, index, data, asked)


def _function(step: Callable[[str], None]) -> dict[str, Any]:
    return all_cards(step, function_of_card)


def function_test(deadline_s: float = DEADLINE_S) -> dict[str, Any]:
    """Whether every card allocates, copies and computes right: {ok, why, count, driver_api, hung, cards, error?}.

    A card: {index, uuid, pci, name, memory_bytes, ok, why, checks: {copy, words, floats}, error?}; `error` is the
    first failing call {call, code, name, text}; a check counts `mismatches` in 32-bit words.
    """
    return answer(_function, deadline_s)


def answer(work: Callable[[Callable[[str], None]], dict[str, Any]], deadline_s: float) -> dict[str, Any]:
    empty = {"ok": False, "count": 0, "cards": [], "driver_api": 0}
    return {**empty, **in_child(work, deadline_s, ENVIRONMENT)}
