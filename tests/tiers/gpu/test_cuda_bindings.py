"""What is known of the driver's call, held against NVIDIA's bindings, and those with a driver that is compiled here."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import files
from pathlib import Path

import pytest
from support_counts import full_alone

from kvtier_gpu.engines.batch_copy import BatchFunction, MemcpyAttributes, SourceOrder
from kvtier_gpu.engines.device import CUDA_VERSION, SYMBOL, find_batch_function

driver = pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings, of the extra cuda")
MEMORY_ORDER = driver.CUmemcpySrcAccessOrder

DRIVER = """
#include <stdint.h>
#include <string.h>
typedef struct { int type, id; } Location;
typedef struct { int order; Location source, target; unsigned flags; } Attributes;

int cuMemcpyBatchAsync(uint64_t *to, uint64_t *from, size_t *sizes, size_t count, Attributes *attributes,
                       size_t *firsts, size_t num_attributes, size_t *failed, void *stream)
{
    *failed = SIZE_MAX;
    if (num_attributes != 1 || firsts[0] != 0 || attributes->order != 1 || attributes->flags != 0 || stream == NULL)
        return 1;
    for (size_t i = 0; i < count; i++)
        memcpy((void *)to[i], (void *)from[i], sizes[i]);
    return 0;
}

int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status)
{
    *function = NULL;
    if (!strcmp(symbol, "cuGetProcAddress"))
        *function = (void *)cuGetProcAddress_v2;
    if (!strcmp(symbol, "cuMemcpyBatchAsync") && version >= 12080 && version < 13000 && DRIVER_VERSION >= 12080)
        *function = (void *)cuMemcpyBatchAsync;
    if (status)
        *status = *function == NULL;
    return 0;
}
"""
"""A driver with the one function, as CUDA 12.8 declares it, where DRIVER_VERSION has it."""

USE = """
import json, sys
import numpy as np
from kvtier.types.arrays import int_array
from kvtier_gpu.copy_plan import Extents
from kvtier_gpu.engines.batch_copy import BatchCopy
from kvtier_gpu.engines.contract import Direction
from kvtier_gpu.engines.device import find_batch_function

found = find_batch_function()
refused, right = [], None
if isinstance(found, int):
    device, region = np.arange(100, dtype=np.uint8), np.zeros(64, dtype=np.uint8)
    pieces = Extents(device.ctypes.data + int_array([50, 0, 10]), int_array([0, 30, 40]), int_array([20, 7, 1]))
    copy = BatchCopy(found)
    refused = [copy.issue(pieces, region, Direction.TO_ROWS, stream) for stream in (0x1000, 0)]
    want = np.zeros(64, dtype=np.uint8)
    want[0:20], want[30:37], want[40] = device[50:70], device[0:7], device[10]
    right = bool((region == want).all())
    refused = [[places.tolist() for places in one] for one in refused] + [copy.last_error]
print(json.dumps([isinstance(found, int) or found, refused, right]))
"""


def test_the_constants_are_those_of_the_driver() -> None:
    assert int(MEMORY_ORDER.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM) == SourceOrder.STREAM
    assert int(MEMORY_ORDER.CU_MEMCPY_SRC_ACCESS_ORDER_ANY) == SourceOrder.ANY


def test_the_attributes_lie_in_memory_as_the_driver_has_them() -> None:
    device = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    theirs = driver.CUmemcpyAttributes()
    theirs.srcAccessOrder = MEMORY_ORDER.CU_MEMCPY_SRC_ACCESS_ORDER_ANY
    places = []
    for number in (5, 6):
        place = driver.CUmemLocation()
        place.type, place.id = device, number
        places.append(place)
    theirs.srcLocHint, theirs.dstLocHint = places
    theirs.flags = 1
    ours = MemcpyAttributes(SourceOrder.ANY, (int(device), 5), (int(device), 6), 1)
    assert ctypes.string_at(theirs.getPtr(), ctypes.sizeof(ours)) == bytes(ours)


def test_the_signature_is_the_drivers() -> None:
    """Bindings of CUDA 12 declare the version that is asked for; those of 13 the next one, without `failIdx`."""
    (declared,) = (file for file in files("cuda-bindings") or () if str(file) == "cuda/bindings/cydriver.pxd")
    text = Path(str(declared.locate())).read_text()
    arguments = re.search(r"CUresult cuMemcpyBatchAsync\(([^)]*)\)", text)
    assert arguments is not None
    named = [argument.split() for argument in arguments[1].split(",")]
    names = [name for *_, name in named]
    if driver.CUDA_VERSION >= 13000:
        named.insert(-1, ["size_t*", "failIdx"])
    kinds = [ctypes.c_size_t if kind == "size_t" else ctypes.c_void_p for kind, _ in named]
    assert kinds == list(BatchFunction._argtypes_)
    assert names[:7] == ["dsts", "srcs", "sizes", "count", "attrs", "attrsIdxs", "numAttrs"]
    assert named[-2:] == [["size_t*", "failIdx"], ["CUstream", "hStream"]]
    assert (SYMBOL, CUDA_VERSION) == (b"cuMemcpyBatchAsync", 12080)


@pytest.mark.parametrize("version", [12080, pytest.param(12060, marks=full_alone())])
def test_the_bindings_find_the_call_in_a_driver_and_it_copies(version: int, tmp_path: Path) -> None:
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        pytest.skip("needs a C compiler")
    library = tmp_path / "libcuda.so.1"
    options = ("-shared", "-fPIC", "-x", "c", f"-DDRIVER_VERSION={version}", "-o", str(library), "-")
    subprocess.run([compiler, *options], input=DRIVER, text=True, check=True)
    paths = {"LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-c", USE], env=os.environ | paths, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    found, refused, right = json.loads(run.stdout.splitlines()[-1])
    if version >= CUDA_VERSION:
        assert (found, refused, right) == (True, [[], [[0, 30, 40]], 1], True)
    else:
        assert found.startswith("the driver is older than CUDA 12.8")


def test_without_the_bindings_it_is_said_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert find_batch_function() == "it needs the package cuda-bindings: pip install 'kvtier[cuda]'"
