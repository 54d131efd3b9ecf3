"""Many copies by a kernel of ours on the device, which reads pinned rows where they are.

The driver's call has a cost for each piece, 1 us for one to the GPU, which bounds short pages; a kernel has none. Two
multiprocessors fill the bus alone, four beside a model that decodes. The pieces of a launch are an argument of it, so
that nothing on the device is needed for them. NVRTC, which comes with torch, compiles it at the first opening for the
device that is there, in a tenth of a second.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from kvtier.types.arrays import IntArray
from kvtier_gpu.copy_plan import Extents
from kvtier_gpu.engines.contract import Bytes, Direction, ManyCopies, sides

PIECES_MAX = 1600
"""Pieces of a launch. The arguments of a kernel have at most 32,764 bytes."""
PIECE_BYTES = 8 << 10
"""What a warp copies before it takes another piece."""
MULTIPROCESSORS, THREADS = 4, 512
PIECES = np.dtype(
    [("targets", "<i8", PIECES_MAX), ("sources", "<i8", PIECES_MAX), ("lengths", "<i4", PIECES_MAX), ("count", "<i4")],
    align=True,
)
"""The argument, as `Pieces` of the kernel."""
NAME = b"kvtier_copy"
SOURCE = f"""
struct Pieces {{
    long long targets[{PIECES_MAX}], sources[{PIECES_MAX}];
    int lengths[{PIECES_MAX}], count;
}};

template <typename Word>
__device__ void copy_piece(long long to, long long from, int bytes)
{{
    constexpr int AT_ONCE = 8, WARP = 32;
    const Word *source = reinterpret_cast<const Word *>(from);
    Word *target = reinterpret_cast<Word *>(to), held[AT_ONCE];
    int words = bytes / sizeof(Word);
    for (int first = threadIdx.x % WARP; first < words; first += WARP * AT_ONCE) {{
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (first + WARP * i < words)
                held[i] = __ldcs(source + first + WARP * i);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (first + WARP * i < words)
                __stcs(target + first + WARP * i, held[i]);
    }}
}}

extern "C" __global__ void __launch_bounds__({THREADS}) {NAME.decode()}(const __grid_constant__ Pieces pieces)
{{
    int warps = gridDim.x * blockDim.x / 32;
    for (int i = (blockIdx.x * blockDim.x + threadIdx.x) / 32; i < pieces.count; i += warps) {{
        long long to = pieces.targets[i], from = pieces.sources[i];
        int bytes = pieces.lengths[i];
        if ((to | from | bytes) % 16 == 0)
            copy_piece<uint4>(to, from, bytes);
        else if ((to | from | bytes) % 4 == 0)
            copy_piece<unsigned>(to, from, bytes);
        else
            copy_piece<unsigned char>(to, from, bytes);
    }}
}}
"""

Launch = Callable[[int, int], int]
"""Launches the kernel: the address of its `PIECES`, which are read during the call, and a stream. Returns the error of
the driver, 0 for none. From any thread."""


def cut(found: Extents, max_bytes: int) -> Extents:
    """The extents in pieces of at most so many bytes."""
    counts = -(-found.lengths // max_bytes)
    source = np.repeat(np.arange(len(counts)), counts)
    offsets = (np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)) * max_bytes
    lengths = np.minimum(found.lengths[source] - offsets, max_bytes)
    return Extents(found.gpu[source] + offsets, found.region[source] + offsets, lengths)


class KernelCopy(ManyCopies):
    """The kernel of a device whose kernels may use the addresses of pinned memory as they are."""

    name = "the copy kernel"

    def __init__(self, launch: Launch) -> None:
        self._launch = launch

    def issue(self, found: Extents, region: Bytes, direction: Direction, stream: int) -> list[IntArray]:
        pieces = cut(found, PIECE_BYTES)
        targets, sources = sides(pieces, region, direction)
        refused = []
        for first in range(0, len(pieces.lengths), PIECES_MAX):
            part = slice(first, first + PIECES_MAX)
            argument = np.empty((), PIECES)
            count = len(pieces.lengths[part])
            for name, values in (("targets", targets), ("sources", sources), ("lengths", pieces.lengths)):
                argument[name][:count] = values[part]
            argument["count"] = count
            if error := self._launch(argument.ctypes.data, stream):
                self.last_error = error
                refused.append(pieces.region[part])
        return refused


@cache
def load_kernel(capability: tuple[int, int], device: int) -> Launch | str:
    """Compile the kernel for a device of this capability and number, whose context is current; or why it cannot be had.

    It stays loaded until the context ends.
    """
    try:
        from cuda.bindings import driver, nvrtc
    except ImportError:
        return "it needs the package cuda-bindings: pip install 'kvtier[cuda]'"
    as_they_are = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
    try:
        error, usable = driver.cuDeviceGetAttribute(as_they_are, device)
        if int(error) or not usable:
            return f"the device has other addresses for pinned memory (CUDA error {int(error)})"
        compiled = _compile(nvrtc, capability)
        if isinstance(compiled, str):
            return compiled
        error, module = driver.cuModuleLoadData(compiled)
        if not int(error):
            error, function = driver.cuModuleGetFunction(module, NAME)
    except RuntimeError as absent:  # no library of that name
        return str(absent).partition("\n")[0]
    if int(error):
        return f"it could not be loaded (CUDA error {int(error)})"

    def launch(argument: int, stream: int) -> int:
        arguments = (ctypes.c_void_p * 1)(argument)
        grid, block, no_shared_memory = (MULTIPROCESSORS, 1, 1), (THREADS, 1, 1), 0
        (refusal,) = driver.cuLaunchKernel(
            function, *grid, *block, no_shared_memory, stream, ctypes.addressof(arguments), 0
        )
        return int(refusal)

    return launch


def _compile(nvrtc: Any, capability: tuple[int, int]) -> bytes | str:
    """The kernel for a device of a capability, or why there is none. `nvrtc` is NVIDIA's module of that name."""
    error, program = nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"kvtier_copy.cu", 0, [], [])
    if not int(error):
        options = [b"--gpu-architecture=sm_%d%d" % capability]
        (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(error):
        return f"it could not be compiled (NVRTC error {int(error)})"
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    compiled = bytes(size)
    (error,) = nvrtc.nvrtcGetCUBIN(program, compiled)
    nvrtc.nvrtcDestroyProgram(program)
    return f"it could not be compiled (NVRTC error {int(error)})" if int(error) else compiled
