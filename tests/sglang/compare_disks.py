"""SGLang's own file backend beside kvtier's disk and a `kvtier serve` with rows for everything above the same disk, in
turns, under SGLang's real controller: GB/s of backups and prefetches.

    python tests/sglang/compare_disks.py FOLDER [--heads 22] [--pages 512] [--turns 5]

Files that SGLang wrote are read back from the disk, not from the page cache: kvtier's direct I/O has no page cache.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import statistics
import sys
import time
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from support_controller import Controller

BACKENDS = ("file", "kvtier", "service")
STACK = """
tiers:
  - {{type: cpu, cpu_bytes_to_use: 2GiB}}
  - {{type: fs, roots: ['{root}/kv'], capacity: 4GiB}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--heads", type=int, default=22, help="12 KiB of a page each")
    parser.add_argument("--pages", type=int, default=512)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--layout", default="page_first")
    options = parser.parse_args()
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    folder = Path(__file__).parent
    sys.path[:0] = map(str, (folder / "on_cpu", folder, folder.parent / "support"))
    warnings.simplefilter("ignore")
    importlib.import_module("cpu_engine")
    support, services = map(importlib.import_module, ("support_controller", "support_service"))
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in BACKENDS}
    for turn in range(options.turns):
        for name in BACKENDS if turn % 2 == 0 else BACKENDS[::-1]:
            root = options.folder / name
            shutil.rmtree(root, ignore_errors=True)
            root.mkdir(parents=True)
            os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(root)
            with ExitStack() as opened:
                extra = None
                if name == "kvtier":
                    place = {"roots": [str(root / "kv")], "capacity": "4GiB"}
                    extra = support.extra_config(**place, load_timeout_seconds=8)
                elif name == "service":
                    (root / "stack.yaml").write_text(STACK.format(root=root))
                    path = str(root / "socket")
                    opened.enter_context(services.stack_process(root / "stack.yaml", path))
                    extra = support.extra_config(service=path, load_timeout_seconds=8)
                controller = support.Controller(options.layout, options.pages, extra, head_num=options.heads)
                figures[name].append(one_turn(controller, options.pages * support.PAGE_TOKENS, root))
                controller.close()
    page = controller.host.get_dummy_flat_data_page().nbytes
    print(f"{options.pages} pages of {page} bytes, {options.layout}, {options.turns} turns; median (lowest to highest)")
    for name, turns in figures.items():
        for what, each in zip(("backup", "prefetch"), zip(*turns, strict=True), strict=True):
            print(f"{name:7} {what:8} {statistics.median(each):.2f} GB/s ({min(each):.2f} to {max(each):.2f})")


def one_turn(controller: Controller, tokens: int, root: Path) -> tuple[float, float]:
    """GB/s of the backup and of the prefetch of one prompt."""
    prompt = list(range(tokens))
    host = controller.host
    indices = host.alloc(tokens)
    host.kv_buffer.random_(0, 100)
    names = controller.hashes(prompt)
    num_bytes = host.get_dummy_flat_data_page().nbytes * len(names)
    began = time.perf_counter()
    controller.controller.write_storage(indices, prompt, hash_value=names)
    stored = controller.controller.ack_backup_queue.get(timeout=600).completed_tokens
    backup = num_bytes / (time.perf_counter() - began) / 1e9
    assert stored == tokens
    host.free(indices)
    forget(root)
    began = time.perf_counter()
    operation = controller.controller.prefetch("request", prompt)
    hit = controller.controller.prefetch_hit_queue.get(timeout=600)
    hit.host_indices = host.alloc(hit.storage_hit_count)
    controller.controller.prefetch_buffer.put(hit)
    loaded = 0
    while not (ack := controller.controller.ack_prefetch_queue.get(timeout=600)).completed_req:
        loaded = ack.completed_tokens if ack.completed_tokens is not None else loaded
    prefetch = num_bytes / (time.perf_counter() - began) / 1e9
    assert operation is hit
    assert loaded == tokens
    host.free(hit.host_indices)
    return backup, prefetch


def forget(root: Path) -> None:
    """Have the kernel drop what it keeps of the files in memory."""
    for path in root.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


if __name__ == "__main__":
    main()
