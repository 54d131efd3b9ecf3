"""A kernel without io_uring: a filter over this process's system calls, and the kernel's own switch."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

from .undo import CAP_SYS_ADMIN, without_root

IO_URING_SETUP = 425
URING_SWITCH = Path("/proc/sys/kernel/io_uring_disabled")
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
URING_FOR_ADMINISTRATORS = "1"
"""The switch's value that denies io_uring to processes without CAP_SYS_ADMIN alone: other tests keep their rings."""
_CAPABILITY_VERSION = 0x20080522
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2


class _Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("value", ctypes.c_uint32)]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("filter", ctypes.POINTER(_Instruction))]


def deny(call: int, errno: int) -> None:
    """From now on a system call ends with an errno in this process and its children, for good. Raises OSError."""
    lines = (
        (_LOAD, 0, 0, 4),
        (_EQUAL, 0, 3, _ARCHITECTURES[platform.machine()]),
        (_LOAD, 0, 0, 0),
        (_EQUAL, 0, 1, call),
        (_RETURN, 0, 0, _ERRNO | errno),
        (_RETURN, 0, 0, _ALLOW),
    )
    program = (_Instruction * len(lines))(*lines)
    libc = ctypes.CDLL(None, use_errno=True)
    whole = _Program(len(lines), program)
    done = libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(whole), 0, 0
    )
    if done:
        number = ctypes.get_errno()
        raise OSError(number, f"no system call filter: {os.strerror(number)}")


def drop_administration() -> None:
    """Give up CAP_SYS_ADMIN in this process and its children, for good. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    failed = libc.capget(header, sets)
    for kind in range(3):  # effective, permitted, inheritable; the first three words hold the capabilities below 32
        sets[kind] &= ~(1 << CAP_SYS_ADMIN)
    if failed or libc.capset(header, sets):
        number = ctypes.get_errno()
        raise OSError(number, f"CAP_SYS_ADMIN cannot be given up: {os.strerror(number)}")


def switch_can_be_set() -> bool:
    """True if the kernel has a switch for io_uring, and this process may turn it and is exempt from it."""
    if without_root():
        return False
    try:
        URING_SWITCH.write_text(URING_SWITCH.read_text())
    except OSError:
        return False
    return True


def without_filter() -> str | None:
    """Why no system call can be denied here, if so."""
    return None if platform.machine() in _ARCHITECTURES else f"no filter for {platform.machine()}"
