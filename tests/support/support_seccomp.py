"""A process of its own that puts a seccomp profile of containers in force, moves blocks, and tries what is forbidden.

It prints what came of it as JSON. The filter stays until the process ends, and loading it needs no privilege.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyseccomp
from support_stack import PLAIN, Engine, fs, keys, load, running, stack_file, store, whole

from kvtier.stack.watching.stats import TierStats

COMPARE = {"SCMP_CMP_NE": pyseccomp.NE, "SCMP_CMP_EQ": pyseccomp.EQ, "SCMP_CMP_MASKED_EQ": pyseccomp.MASKED_EQ}
NEW_USER, NEW_NET, CHILD_SIGNAL = 0x10000000, 0x40000000, 17
CLONE3 = 435
UNIX, VSOCK, STREAM = 1, 40, 1


def number_of(name: str) -> int:
    """The number of a call here; negative, or a ValueError, for one that libseccomp does not know."""
    number: int = pyseccomp.resolve_syscall(pyseccomp.system_arch(), name)
    return number


def action_of(rule: Mapping[str, Any]) -> Any:
    return pyseccomp.ALLOW if rule["action"] == "SCMP_ACT_ALLOW" else pyseccomp.ERRNO(rule["errnoRet"])


def put_in_force(profile: Mapping[str, Any]) -> int:
    """As a container runtime does; calls that libseccomp does not know are left out. Returns how many it knows."""
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    known, filters = 0, pyseccomp.SyscallFilter(pyseccomp.ERRNO(profile["defaultErrnoRet"]))
    for rule in profile["syscalls"]:
        arguments = [
            pyseccomp.Arg(one["index"], COMPARE[one["op"]], one["value"], one.get("valueTwo", 0))
            for one in rule.get("args", ())
        ]
        for name in rule["names"]:
            try:
                number = number_of(name)
            except ValueError:
                continue
            if number >= 0:
                filters.add_rule(action_of(rule), number, *arguments)
                known += 1
    filters.load()
    return known


async def moved(root: Path) -> TierStats:
    """Store eight blocks, push them out of memory, and load them from disk."""
    engine, some = Engine(PLAIN, 16), whole(keys(8))
    async with running(stack_file(PLAIN, 8, fs(root, io_engine="auto")), engine) as stack:
        for group in (some, whole(keys(8, tag="other"))):
            assert (await store(stack, engine, group)).ok
            assert await stack.drain(30)
        assert (await load(stack, engine, some)).ok
        return stack.stats().tiers["fs"]


def tried(number: int, *arguments: Any) -> int:
    """The error of a system call, 0 for none."""
    libc = ctypes.CDLL(None, use_errno=True)
    ctypes.set_errno(0)
    return 0 if libc.syscall(number, *arguments) >= 0 else ctypes.get_errno()


def main(profile: str, root: str) -> None:
    """Under the profile: move blocks, then try what a container must not do."""
    known = put_in_force(json.loads(Path(profile).read_text()))
    figures = asyncio.run(moved(Path(root)))
    found = {
        "known": known,
        "io_engine": figures.io_engine,
        "loaded": figures.loaded,
        "unshare": tried(number_of("unshare"), NEW_NET),
        "mount": tried(number_of("mount"), b"none", b"/no/such/folder", b"tmpfs", 0, None),
        "bpf": tried(number_of("bpf"), 0, None, 0),
        "user_namespace": tried(number_of("clone"), NEW_USER | CHILD_SIGNAL, None, None, None, None),
        "clone3": tried(CLONE3, None, 0),
        "vsock": tried(number_of("socket"), VSOCK, STREAM, 0),
        "unix": tried(number_of("socket"), UNIX, STREAM, 0),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
