"""A process that watches another one's shared region and folders from outside, as fast as it can, until stdin ends.

Arguments: process id, then folders. Prints one JSON object: how often it looked and the most it saw.
"""

from __future__ import annotations

import json
import os
import select
import sys


def regions(pid: int) -> dict[int, tuple[int, int]]:
    """(size, bytes allocated) of the rows of each region that a process holds open, by inode."""
    found = {}
    for fd in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{fd}"
        try:
            if "memfd:kvtier-rows" not in os.readlink(path):
                continue
            status = os.stat(path)
        except FileNotFoundError:
            continue
        found[status.st_ino] = status.st_size, status.st_blocks * 512
    return found


def folder_bytes(folder: str) -> int:
    """What a folder and everything in it occupies, as the file system counts it."""
    total = 0
    for place, _, files in os.walk(folder):
        for path in [place, *(os.path.join(place, name) for name in files)]:
            try:
                total += os.lstat(path).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def watch(pid: int, folders: list[str]) -> dict[str, object]:
    before = regions(pid)
    samples, size, allocated, most = 0, 0, 0, dict.fromkeys(folders, 0)
    print("watching", flush=True)
    while not select.select([sys.stdin], [], [], 0.0005)[0]:
        new = [sizes for inode, sizes in regions(pid).items() if inode not in before]
        size = max(size, sum(one for one, _ in new))
        allocated = max(allocated, sum(one for _, one in new))
        for folder in folders:
            most[folder] = max(most[folder], folder_bytes(folder))
        samples += 1
    return {"samples": samples, "size": size, "allocated": allocated, "folders": most}


if __name__ == "__main__":
    print(json.dumps(watch(int(sys.argv[1]), sys.argv[2:])), flush=True)
