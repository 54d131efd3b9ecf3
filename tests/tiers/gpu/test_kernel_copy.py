"""The copy kernel, compiled for the host: each of its threads copies in turn."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from kvtier.types.arrays import int_array
from kvtier_gpu.copy_plan import Extents
from kvtier_gpu.engines.contract import Direction
from kvtier_gpu.engines.kernel_copy import (
    MULTIPROCESSORS,
    NAME,
    PIECE_BYTES,
    PIECES,
    PIECES_MAX,
    SOURCE,
    THREADS,
    KernelCopy,
    cut,
    load_kernel,
)

HEAD = """
#include <stddef.h>
struct Index { int x; };
struct uint4 { unsigned x, y, z, w; };
static Index gridDim, blockDim, blockIdx, threadIdx;
#define __global__
#define __device__
#define __grid_constant__
#define __launch_bounds__(threads)
template <typename T> T __ldcs(const T *from) { return *from; }
template <typename T> void __stcs(T *to, T value) { *to = value; }
"""
TAIL = """
extern "C" void launch(const Pieces *pieces, int blocks, int threads)
{
    gridDim.x = blocks;
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++)
            %s(*pieces);
}
extern "C" size_t size_of_pieces() { return sizeof(Pieces); }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    made = tmp_path_factory.mktemp("kernel") / "kernel.so"
    options = ("-O1", "-shared", "-fPIC", "-Wno-unknown-pragmas", "-x", "c++", "-o", str(made), "-")
    text = HEAD + re.sub("#pragma unroll", "", SOURCE) + TAIL % NAME.decode()
    subprocess.run([compiler, *options], input=text, text=True, check=True)
    return ctypes.CDLL(str(made))


def test_its_argument_is_laid_out_as_here_and_fits_into_those_of_a_kernel(library: ctypes.CDLL) -> None:
    assert library.size_of_pieces() == PIECES.itemsize <= 32764


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("step", [16, 4, 1])
def test_every_piece_comes_whole_and_nothing_else_changes(
    library: ctypes.CDLL, direction: Direction, step: int, seed: int
) -> None:
    """Of any length and address: by words of 16 and of 4 bytes, and by bytes."""
    random = np.random.default_rng(seed)
    lengths = random.permutation([step, 3 * step, 512, 4096 + step, PIECE_BYTES, 2 * PIECE_BYTES + step, 100 * step])
    lengths = np.tile(lengths, 250)
    starts = np.cumsum(lengths + step) - lengths
    size = int(starts[-1] + lengths[-1]) + 64
    device, region = (random.integers(0, 256, size, dtype=np.uint8) for _ in range(2))
    order = random.permutation(len(lengths))
    found = Extents(int_array(starts) + device.ctypes.data, int_array(starts), int_array(lengths))
    found = found.select(int_array(order))
    to, source = (region, device) if direction is Direction.TO_ROWS else (device, region)
    want = to.copy()
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        want[start : start + length] = source[start : start + length]
    launches = []

    def launch(argument: int, stream: int) -> int:
        launches.append(stream)
        library.launch(ctypes.c_void_p(argument), MULTIPROCESSORS, THREADS)
        return 0

    assert KernelCopy(launch).issue(found, region, direction, 5) == []
    assert launches == [5] * -(-len(cut(found, PIECE_BYTES).lengths) // PIECES_MAX)
    assert len(launches) > 1
    assert (to == want).all()


def test_cut_pieces_follow_each_other_and_are_short() -> None:
    whole = Extents(int_array([1000, 5000]), int_array([70, 10]), int_array([25, 10]))
    pieces = cut(whole, 10)
    assert pieces.gpu.tolist() == [1000, 1010, 1020, 5000]
    assert pieces.region.tolist() == [70, 80, 90, 10]
    assert pieces.lengths.tolist() == [10, 10, 5, 10]


def test_without_the_bindings_it_is_said_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert load_kernel.__wrapped__((9, 0), 0) == "it needs the package cuda-bindings: pip install 'kvtier[cuda]'"


def test_a_compiler_that_is_absent_or_refuses_is_a_reason() -> None:
    """Without a driver or NVRTC, as on this machine most often."""
    pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings, of the extra cuda")
    found = load_kernel.__wrapped__((1, 0), 0)  # no compiler makes code for so old a device
    assert isinstance(found, str)
    assert found
