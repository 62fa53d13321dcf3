"""The CUDA driver API by ctypes: checked calls, a card's identity, a session on a card; and our kernels as PTX text.

Python 3.8, standard library only. Needs libcuda.so.1 when a Driver is made, not to be imported.
"""

from __future__ import annotations

import ctypes
from typing import Any, Callable

LIBRARY = "libcuda.so.1"
PEER_ALREADY_ENABLED = 704

# y[i] = (a * x[i] + y[i]) ^ i for 32-bit words; y[i] = a * x[i] + y[i] for floats; nothing, for launch latency.
# fma: eight independent chains f = a * f + b, four links a round, begun at i, i + b, i + 2b, ...; with a = b = 1 every
# step is exact and out[i] = i + 4 * rounds - 4, if no chain lost a step.
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

.visible .entry gpuchange_fma(.param .u64 p_out, .param .f32 p_a, .param .f32 p_b, .param .u32 p_rounds)
{
    .reg .pred %p<2>;
    .reg .f32 %f<15>;
    .reg .b32 %r<8>;
    .reg .b64 %rd<4>;

    ld.param.u64 %rd1, [p_out];
    ld.param.f32 %f9, [p_a];
    ld.param.f32 %f10, [p_b];
    ld.param.u32 %r1, [p_rounds];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    cvt.rn.f32.u32 %f1, %r5;
    add.rn.f32 %f2, %f1, %f10;
    add.rn.f32 %f3, %f2, %f10;
    add.rn.f32 %f4, %f3, %f10;
    add.rn.f32 %f5, %f4, %f10;
    add.rn.f32 %f6, %f5, %f10;
    add.rn.f32 %f7, %f6, %f10;
    add.rn.f32 %f8, %f7, %f10;
    mov.u32 %r6, 0;
FMA_LOOP:
    fma.rn.f32 %f1, %f1, %f9, %f10;
    fma.rn.f32 %f2, %f2, %f9, %f10;
    fma.rn.f32 %f3, %f3, %f9, %f10;
    fma.rn.f32 %f4, %f4, %f9, %f10;
    fma.rn.f32 %f5, %f5, %f9, %f10;
    fma.rn.f32 %f6, %f6, %f9, %f10;
    fma.rn.f32 %f7, %f7, %f9, %f10;
    fma.rn.f32 %f8, %f8, %f9, %f10;
    fma.rn.f32 %f1, %f1, %f9, %f10;
    fma.rn.f32 %f2, %f2, %f9, %f10;
    fma.rn.f32 %f3, %f3, %f9, %f10;
    fma.rn.f32 %f4, %f4, %f9, %f10;
    fma.rn.f32 %f5, %f5, %f9, %f10;
    fma.rn.f32 %f6, %f6, %f9, %f10;
    fma.rn.f32 %f7, %f7, %f9, %f10;
    fma.rn.f32 %f8, %f8, %f9, %f10;
    fma.rn.f32 %f1, %f1, %f9, %f10;
    fma.rn.f32 %f2, %f2, %f9, %f10;
    fma.rn.f32 %f3, %f3, %f9, %f10;
    fma.rn.f32 %f4, %f4, %f9, %f10;
    fma.rn.f32 %f5, %f5, %f9, %f10;
    fma.rn.f32 %f6, %f6, %f9, %f10;
    fma.rn.f32 %f7, %f7, %f9, %f10;
    fma.rn.f32 %f8, %f8, %f9, %f10;
    fma.rn.f32 %f1, %f1, %f9, %f10;
    fma.rn.f32 %f2, %f2, %f9, %f10;
    fma.rn.f32 %f3, %f3, %f9, %f10;
    fma.rn.f32 %f4, %f4, %f9, %f10;
    fma.rn.f32 %f5, %f5, %f9, %f10;
    fma.rn.f32 %f6, %f6, %f9, %f10;
    fma.rn.f32 %f7, %f7, %f9, %f10;
    fma.rn.f32 %f8, %f8, %f9, %f10;
    add.u32 %r6, %r6, 1;
    setp.lt.u32 %p1, %r6, %r1;
    @%p1 bra FMA_LOOP;
    sub.rn.f32 %f11, %f1, %f2;
    sub.rn.f32 %f12, %f3, %f4;
    sub.rn.f32 %f13, %f5, %f6;
    sub.rn.f32 %f14, %f7, %f8;
    add.rn.f32 %f11, %f11, %f12;
    add.rn.f32 %f13, %f13, %f14;
    add.rn.f32 %f11, %f11, %f13;
    add.rn.f32 %f11, %f11, %f1;
    cvta.to.global.u64 %rd1, %rd1;
    mul.wide.u32 %rd2, %r5, 4;
    add.s64 %rd3, %rd1, %rd2;
    st.global.f32 [%rd3], %f11;
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

    def peer(self, index: int) -> ctypes.c_void_p:
        """Another card's primary context, reachable by direct copies if the hardware can; ours stays current."""
        context, other = ctypes.c_void_p(), ctypes.c_int(index)
        self.driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), other)
        self.later("cuDevicePrimaryCtxRelease_v2", other)
        if self.driver.number("cuDeviceCanAccessPeer", self.device, other):
            enabled = self.driver.library.cuCtxEnablePeerAccess(context, ctypes.c_uint(0))
            if enabled not in (0, PEER_ALREADY_ENABLED):
                raise CudaError("cuCtxEnablePeerAccess", enabled, self.driver.describe("cuGetErrorName", enabled), "")
        return context

    def event(self) -> ctypes.c_void_p:
        event = ctypes.c_void_p()
        self.driver.call("cuEventCreate", ctypes.byref(event), ctypes.c_uint(0))
        self.later("cuEventDestroy_v2", event)
        return event
