"""Tests and measures NVIDIA cards through the CUDA driver API (libcuda.so.1, by ctypes). Needs no toolkit.

`function_test` and `bench_test` run in a child process with a deadline: a driver that hangs, even in the kernel,
costs the child, not the play. Python 3.8, standard library only.
"""

from __future__ import annotations

import array
import ctypes
import os
import statistics
from typing import Any, Callable, Dict

from ansible.module_utils.gpuchange_child import in_child

LIBRARY = "libcuda.so.1"
DEADLINE_S = 35.0
COPY_BYTES = 64 << 20
KERNEL_ELEMENTS = 1 << 18
THREADS = 256
BENCH_BYTES = 32 << 20
WARM_UPS, REPEATS = 2, 7
LAUNCHES = 200

ENVIRONMENT = {
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the order nvidia-smi uses
    "CUDA_CACHE_DISABLE": "1",  # a test leaves no compiled kernels in a home directory
}

# y[i] = (a * x[i] + y[i]) ^ i for 32-bit words; y[i] = a * x[i] + y[i] for floats; nothing, for launch latency.
# ISA 6.0 and sm_50: every driver since CUDA 9 compiles it for every card since Maxwell.
PTX = b"""
.version 6.0
.target sm_50
.address_size 64

.visible .entry gpuchange_words(.param .u64 p_x, .param .u64 p_y, .param .u32 p_a, .param .u32 p_n)
{
    .reg .pred %p<2>;
    .reg .b32 %r<12>;
    .reg .b64 %rd<8>;

    ld.param.u64 %rd1, [p_x];
    ld.param.u64 %rd2, [p_y];
    ld.param.u32 %r1, [p_a];
    ld.param.u32 %r2, [p_n];
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, %ntid.x;
    mov.u32 %r5, %tid.x;
    mad.lo.s32 %r6, %r3, %r4, %r5;
    setp.ge.u32 %p1, %r6, %r2;
    @%p1 bra WORDS_END;
    cvta.to.global.u64 %rd3, %rd1;
    cvta.to.global.u64 %rd4, %rd2;
    mul.wide.u32 %rd5, %r6, 4;
    add.s64 %rd6, %rd3, %rd5;
    add.s64 %rd7, %rd4, %rd5;
    ld.global.u32 %r7, [%rd6];
    ld.global.u32 %r8, [%rd7];
    mad.lo.s32 %r9, %r7, %r1, %r8;
    xor.b32 %r10, %r9, %r6;
    st.global.u32 [%rd7], %r10;
WORDS_END:
    ret;
}

.visible .entry gpuchange_floats(.param .u64 p_x, .param .u64 p_y, .param .f32 p_a, .param .u32 p_n)
{
    .reg .pred %p<2>;
    .reg .f32 %f<6>;
    .reg .b32 %r<8>;
    .reg .b64 %rd<8>;

    ld.param.u64 %rd1, [p_x];
    ld.param.u64 %rd2, [p_y];
    ld.param.f32 %f1, [p_a];
    ld.param.u32 %r1, [p_n];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    setp.ge.u32 %p1, %r5, %r1;
    @%p1 bra FLOATS_END;
    cvta.to.global.u64 %rd3, %rd1;
    cvta.to.global.u64 %rd4, %rd2;
    mul.wide.u32 %rd5, %r5, 4;
    add.s64 %rd6, %rd3, %rd5;
    add.s64 %rd7, %rd4, %rd5;
    ld.global.f32 %f2, [%rd6];
    ld.global.f32 %f3, [%rd7];
    fma.rn.f32 %f4, %f1, %f2, %f3;
    st.global.f32 [%rd7], %f4;
FLOATS_END:
    ret;
}

.visible .entry gpuchange_nothing()
{
    ret;
}
"""


class CudaError(Exception):
    """A driver API call that failed: `call`, its `code`, and the driver's `name` and `text` for it."""

    def __init__(self, call: str, code: int, name: str, text: str) -> None:
        super().__init__("%s: %s (%d, %s)" % (call, name, code, text))
        self.fields: dict[str, Any] = {"call": call, "code": code, "name": name, "text": text}


class Driver:
    """libcuda's functions by name, each checked. Raises CudaError."""

    def __init__(self) -> None:
        try:
            self.library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise CudaError("dlopen", -1, "no driver library", str(error))

    def call(self, function: str, *arguments: Any) -> None:
        try:
            code = getattr(self.library, function)(*arguments)
        except AttributeError:
            raise CudaError(function, -2, "missing", "%s does not have this function" % LIBRARY)
        if code:
            raise CudaError(
                function, code, self.describe("cuGetErrorName", code), self.describe("cuGetErrorString", code)
            )

    def describe(self, function: str, code: int) -> str:
        text = ctypes.c_char_p()
        getattr(self.library, function)(code, ctypes.byref(text))
        return (text.value or b"unknown").decode("ascii", "replace")

    def number(self, function: str, *arguments: Any, kind: Any = ctypes.c_int) -> int:
        """The value that a function writes through its first parameter."""
        value = kind()
        self.call(function, ctypes.byref(value), *arguments)
        return int(value.value or 0)


def identity(driver: Driver, index: int) -> dict[str, Any]:
    """Who a card is, as the driver API names it; uuid and pci in nvidia-smi's and the kernel's spelling."""
    device = ctypes.c_int(driver.number("cuDeviceGet", ctypes.c_int(index)))
    name, pci, raw = ctypes.create_string_buffer(128), ctypes.create_string_buffer(32), ctypes.create_string_buffer(16)
    driver.call("cuDeviceGetName", name, ctypes.c_int(128), device)
    driver.call("cuDeviceGetPCIBusId", pci, ctypes.c_int(32), device)
    driver.call("cuDeviceGetUuid", raw, device)
    digits = raw.raw.hex()
    parts = [digits[start:end] for start, end in ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32))]
    return {
        "index": index,
        "uuid": "GPU-" + "-".join(parts),
        "pci": pci.value.decode("ascii", "replace").lower(),
        "name": name.value.decode("utf-8", "replace"),
        "memory_bytes": driver.number("cuDeviceTotalMem_v2", device, kind=ctypes.c_size_t),
    }


class Session:
    """The primary context of one card, with its allocations and modules; all given back at the end."""

    def __init__(self, driver: Driver, index: int) -> None:
        self.driver, self.device = driver, ctypes.c_int(index)
        self.undo: list[Callable[[], None]] = []

    def __enter__(self) -> Session:
        context = ctypes.c_void_p()
        self.driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self.device)
        self.later("cuDevicePrimaryCtxRelease_v2", self.device)
        self.driver.call("cuCtxSetCurrent", context)
        return self

    def __exit__(self, *_: object) -> None:
        for undo in reversed(self.undo):
            undo()

    def later(self, function: str, *arguments: Any) -> None:
        def give_back() -> None:
            getattr(self.driver.library, function)(*arguments)  # after a failed call, failing to tidy up is no news

        self.undo.append(give_back)

    def allocate(self, size: int) -> ctypes.c_uint64:
        pointer = ctypes.c_uint64()
        self.driver.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        self.later("cuMemFree_v2", pointer)
        return pointer

    def pinned(self, size: int) -> ctypes.c_void_p:
        pointer = ctypes.c_void_p()
        self.driver.call("cuMemHostAlloc", ctypes.byref(pointer), ctypes.c_size_t(size), ctypes.c_uint(0))
        self.later("cuMemFreeHost", pointer)
        return pointer

    def upload(self, data: bytes) -> ctypes.c_uint64:
        pointer = self.allocate(len(data))
        self.driver.call("cuMemcpyHtoD_v2", pointer, ctypes.c_char_p(data), ctypes.c_size_t(len(data)))
        return pointer

    def download(self, pointer: ctypes.c_uint64, size: int) -> bytes:
        data = ctypes.create_string_buffer(size)
        self.driver.call("cuMemcpyDtoH_v2", data, pointer, ctypes.c_size_t(size))
        return data.raw

    def module(self) -> ctypes.c_void_p:
        module = ctypes.c_void_p()
        self.driver.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(PTX))
        self.later("cuModuleUnload", module)
        return module

    def function(self, module: ctypes.c_void_p, name: bytes) -> ctypes.c_void_p:
        function = ctypes.c_void_p()
        self.driver.call("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(name))
        return function

    def launch(self, function: ctypes.c_void_p, blocks: int, threads: int, *values: Any) -> None:
        """One one-dimensional launch on the default stream; `values` are ctypes objects."""
        pointers = (ctypes.c_void_p * max(1, len(values)))(*[ctypes.addressof(value) for value in values])
        grid = [ctypes.c_uint(n) for n in (blocks, 1, 1, threads, 1, 1, 0)]
        self.driver.call("cuLaunchKernel", function, *grid, None, pointers, None)

    def event(self) -> ctypes.c_void_p:
        event = ctypes.c_void_p()
        self.driver.call("cuEventCreate", ctypes.byref(event), ctypes.c_uint(0))
        self.later("cuEventDestroy_v2", event)
        return event


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


# --- bench: how fast is it? --------------------------------------------------------------------------------------


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


def measure(session: Session, work: Callable[[], None], times: int, metric: Callable[[float], float]) -> dict[str, Any]:
    """Median of REPEATS samples after warm-up; `spread` is (largest - smallest) / median."""
    for _ in range(WARM_UPS):
        sample(session, work, times)
    values = [metric(sample(session, work, times)) for _ in range(REPEATS)]
    median = statistics.median(values)
    return {
        "median": round(median, 4),
        "spread": round((max(values) - min(values)) / median, 4),
        "samples": len(values),
    }


def bench_card(driver: Driver, index: int) -> dict[str, Any]:
    """h2d, d2h, d2d in GB/s (10^9 bytes copied per second, pinned host memory), launch in microseconds."""
    size = ctypes.c_size_t(BENCH_BYTES)
    with Session(driver, index) as session:
        host, first, second = session.pinned(BENCH_BYTES), session.allocate(BENCH_BYTES), session.allocate(BENCH_BYTES)
        nothing = session.function(session.module(), b"gpuchange_nothing")
        ctypes.memset(host, 0x5A, BENCH_BYTES)
        copies = {
            "h2d": lambda: driver.call("cuMemcpyHtoDAsync_v2", first, host, size, None),
            "d2h": lambda: driver.call("cuMemcpyDtoHAsync_v2", host, first, size, None),
            "d2d": lambda: driver.call("cuMemcpyDtoDAsync_v2", second, first, size, None),
        }
        metrics = {name: measure(session, copy, 1, lambda ms: BENCH_BYTES / ms / 1e6) for name, copy in copies.items()}
        launch = lambda: session.launch(nothing, 1, 32)  # noqa: E731
        metrics["launch"] = measure(session, launch, LAUNCHES, lambda ms: ms * 1e3 / LAUNCHES)
    return {"ok": True, "why": "", "metrics": metrics}


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


def _bench(step: Callable[[str], None]) -> dict[str, Any]:
    return all_cards(step, lambda: bench_card)


def function_test(deadline_s: float = DEADLINE_S) -> dict[str, Any]:
    """Whether every card allocates, copies and computes right: {ok, why, count, driver_api, hung, cards, error?}.

    A card: {index, uuid, pci, name, memory_bytes, ok, why, checks: {copy, words, floats}, error?}; `error` is the
    first failing call {call, code, name, text}; a check counts `mismatches` in 32-bit words.
    """
    return _answer(_function, deadline_s)


def bench_test(deadline_s: float = DEADLINE_S) -> dict[str, Any]:
    """Like function_test, but each card has `metrics`: h2d, d2h, d2d (GB/s) and launch (microseconds), each
    {median, spread, samples}."""
    return _answer(_bench, deadline_s)


def _answer(work: Callable[[Callable[[str], None]], dict[str, Any]], deadline_s: float) -> dict[str, Any]:
    empty = {"ok": False, "count": 0, "cards": [], "driver_api": 0}
    return {**empty, **in_child(work, deadline_s, ENVIRONMENT)}
