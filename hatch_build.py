"""Compiles the one piece of kvtier that is not Python, where there is a C compiler; without one the wheel goes without.

What it is for and what it gains is told in docs/native.md. It needs no Python headers: it is loaded through ctypes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = "backends/kvtier_gpu/engines/native_copy.c"
TARGET = "backends/kvtier_gpu/engines/native_copy.native.so"
FLAGS = ("-std=c11", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-s")


class CompileHook(BuildHookInterface):  # type: ignore[type-arg]
    """Runs before a wheel is put together, an editable one included."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile beside the source, and make the wheel one of this platform if that worked."""
        target = Path(self.root) / TARGET
        target.unlink(missing_ok=True)
        compiler = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), None)
        if compiler is None:
            self.app.display_warning("kvtier: no C compiler; scattered copies in host memory will go through numpy")
            return
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            compiled = Path(folder) / target.name
            command = [*compiler.split(), *FLAGS, "-o", str(compiled), str(Path(self.root) / SOURCE)]
            try:
                subprocess.run(command, check=True, capture_output=True, text=True)
            except (OSError, subprocess.CalledProcessError) as error:
                said = getattr(error, "stderr", None) or error
                self.app.display_warning(f"kvtier: {' '.join(command)} failed: {said}; copies will go through numpy")
                return
            os.replace(compiled, target)  # a process may have the old one mapped
        build_data["artifacts"].append(TARGET)
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
